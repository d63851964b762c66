"""`sdp_deepspeed.reestimate_batch_norm`: the one call for models of both hosts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from sdp_deepspeed.messages import listed


def reestimate_batch_norm(engine_or_model: Any, batches: Iterable[Any], *, num_batches: int) -> int:
    """Give batch norms running statistics of the dense model, from some training batches; all ranks call it.

    In the forward regime training has averaged those of subnetworks, which fit no evaluation of the dense model. Call
    it before an evaluation, an export, and a checkpoint that is to be exported. Each rank runs batches of its own
    through the dense model, without gradients: batch norms normalize with their batch and all else is as in evaluation.
    The statistics become the means over all batches of all ranks (cumulative, whatever `momentum` says), and
    `num_batches_tracked` the number of a rank's batches. Modes, `momentum` and random numbers stay as they are.

    Args:
        engine_or_model: the engine of a config with the block, or what `fully_shard` returned, or a module around that
            as its `module`. It may be inside of the dense model (`engine.dense`, `sdp_deepspeed.fsdp.dense`).
        batches: of this rank, as the model's `forward` takes them: each a dict of keyword arguments, a tuple or list of
            arguments, or the one argument; on the model's device. Only the first `num_batches` are taken.
        num_batches: on each rank.

    Returns:
        How many batch norms there are; 0 if none, after a line that says so.

    Raises:
        ValueError: on all ranks: a rank has fewer batches, or `num_batches` is no number for all; of a model that is
            neither. The running statistics are as they were.
        RuntimeError: on all ranks, if the model fails with a batch; on those that wait, if a rank does not call it.
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
        "subnetwork_data_parallel, or a model of sdp_deepspeed.fully_shard; others have the dense model's statistics"
    )


def batches_of(batches: Iterable[Any], num_batches: int, control: Any) -> list[Any]:
    """The first batches of this rank; all ranks call it.

    Args:
        control: gloo group of all ranks.

    Raises:
        ValueError: on all ranks: one has fewer, or they were given other numbers.
    """
    from sdp_deepspeed.parallel.agree import gather_objects, run_on_all_ranks

    def take() -> list[Any]:
        own = list(itertools.islice(batches, num_batches))
        if len(own) < num_batches or num_batches < 1:
            raise ValueError(f"num_batches: got {num_batches}, but there are {len(own)}; give each rank as many")
        return own

    own = run_on_all_ranks(take, control)
    if len(set(numbers := gather_objects(num_batches, control))) > 1:
        raise ValueError(f"num_batches: got {listed(numbers)} on ranks in their order; give all the same")
    return own
