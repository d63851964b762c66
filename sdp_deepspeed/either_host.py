"""Functions that take DeepSpeed's engine or a model of FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def reestimate_batch_norm(engine_or_model: Any, batches: Iterable[Any], *, num_batches: int) -> int:
    """Estimate the running statistics of the dense model's batch norms from training batches; collective.

    In the forward regime, training collects the statistics of subnetworks, which do not fit the dense model. Call this
    before an evaluation, an export, or a checkpoint to be exported. Each rank runs its batches through the dense model
    without gradients. Batch norms normalize with batch statistics; other modules are in evaluation mode. The statistics
    become the means over all batches of all ranks, independent of `momentum`; `num_batches_tracked` becomes the number
    of batches per rank. Training modes, `momentum` and random state are unchanged.

    Args:
        engine_or_model: the engine, or a model that `fully_shard` returned, or a wrapper with that as its `module`.
            The dense model may be active (`engine.dense`).
        batches: inputs of the model's `forward` on its device: dicts of keyword arguments, tuples or lists of
            arguments, or single arguments. Only the first `num_batches` are used.
        num_batches: number of batches on each rank.

    Returns:
        The number of batch norms with running statistics.

    Raises:
        ValueError: on all ranks, if a rank has fewer batches, `num_batches` differs, or the model is of another kind.
            The statistics are unchanged.
        RuntimeError: on all ranks, if the model fails on a batch; on the waiting ranks, if a rank does not call it.
    """
    of_engine = getattr(engine_or_model, "reestimate_batch_norm", None)
    if callable(of_engine):
        return int(of_engine(batches, num_batches=num_batches))
    from sdp_deepspeed.fsdp.export import reestimate_batch_norm as of_sharded
    from sdp_deepspeed.fsdp.sharded_model import is_sharded

    for module in (engine_or_model, getattr(engine_or_model, "module", None)):
        if module is not None and is_sharded(module):
            return of_sharded(module, batches, num_batches=num_batches)
    raise ValueError(
        f"reestimate_batch_norm: got {type(engine_or_model).__name__}, expected the engine of a config with the block "
        "subnetwork_data_parallel, or a model of sdp_deepspeed.fully_shard"
    )
