"""The dense model's weights in one place, for export: a collective of all ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.checkpoint.interop.hugging_face_names import new_model
from sdp_deepspeed.config import KEY
from sdp_deepspeed.distributed.agreement import raise_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.monitored_barrier import Phase
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, sharded_model_of
from sdp_deepspeed.fsdp.wrappers import without_wrappers
from sdp_deepspeed.plan.tensors import named_tensors

logger = logging.getLogger("sdp_deepspeed")


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The dense model's state dict on rank 0, in host memory; empty on the others. Every rank calls it.

    Units come one after the other, so that no device ever has more than one beside its shards. Branches are scaled, if
    the block says so (`dense_branch_scale`). Buffers of what is shared, but for
    running statistics of batch norms, and `ignored_params` are rank 0's own.

    Args:
        module: that `fully_shard` returned.

    Raises:
        RuntimeError: on all ranks, when they do not call it together, inside `dense(model)`, or if rank 0 has no room.
    """
    sharded = sharded_model_of(module)
    if sharded.view.is_inside:
        raise RuntimeError("full_state_dict inside `with dense(model):`: leave it first, on all ranks")
    sharded.view.meet(Phase.RESIDENT)
    call = "sdp_deepspeed.fsdp.reestimate_batch_norm(model, batches, num_batches=...)"
    sharded.view.statistics.warn_of_subnetworks(_warn_on_rank_0, call)
    with torch.no_grad():
        sharded.reshard()
        values, error = _kept_on_rank_0(sharded)
    raise_on_all_ranks(Communicator(dist), error)
    if dist.get_rank() != 0:
        return {}
    with without_wrappers(module):
        own = named_tensors(module)
    # Names that stand for one tensor (tied weights) stand for one here too.
    return {name: values[of] if of in values else _on_host(own[of]) for name, of in sharded.state_names.items()}


def save_pretrained(module: nn.Module, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
    """Write the dense model in Hugging Face format, complete or not at all; all ranks call it, rank 0 writes.

    Args:
        module: that `fully_shard` returned, of a class with a `save_pretrained`.
        tokenizer: saved beside the model if given.
        options: of the model's own `save_pretrained`, such as `max_shard_size`.

    Raises:
        RuntimeError: on all ranks, why rank 0 could not write.
    """
    state, error = full_state_dict(module), None
    if dist.get_rank() == 0:
        named = {"repo_id": Path(folder).name} if options.get("push_to_hub") else {}  # not as the staging folder
        try:
            with new_model(Path(folder), variant=options.get("variant")) as staging:
                save: Any = module
                save.save_pretrained(str(staging), state_dict=state, **(named | options))
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(staging))
        except Exception as problem:  # of any kind: the others wait for this rank
            error = RuntimeError(f"save_pretrained: cannot write {folder}: {problem}")
    raise_on_all_ranks(Communicator(dist), error)


def _warn_on_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s: %s", KEY, text)


def _kept_on_rank_0(sharded: ShardedModel) -> tuple[dict[str, torch.Tensor], RuntimeError | None]:
    """Copies in host memory. Without room for them rank 0 goes through the rest all the same, as others wait for it."""
    tensor_parallel = sharded.tensor_parallel
    values: dict[str, torch.Tensor] = {}
    error = None
    for name, value, scale in _gathered(sharded):
        if tensor_parallel is not None and sharded.rank == 0:  # whose ranks all have it, in the same order
            value = tensor_parallel.full(name, value)
        if dist.get_rank() == 0 and error is None:
            try:
                values[name] = _scaled(_on_host(value), scale)
            except (RuntimeError, MemoryError) as problem:
                values.clear()
                error = RuntimeError(f"full_state_dict: rank 0 cannot keep {name!r} in host memory: {problem}")
    return values, error


def _gathered(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Every parameter, and what units have of buffers, each with the scale of its branch that it does not have yet, on
    ranks that get it; all ranks go through all of it."""
    for tensor in sharded.shared:
        yield tensor.name, sharded.parameter(tensor).full_tensor(), 1.0
    places = {part.name: index for index, part in enumerate(sharded.mask.parts)}
    for unit in sharded.units:
        scale_of = sharded.mask.scales_of(unit.name)
        for tensor in filter(_is_whole, unit.tensors):  # on holders
            yield tensor.name, sharded.parameter(tensor).full_tensor(), scale_of(tensor.dense_name)
        if unit.name in places:  # some lack it
            for name, value in _fetched(sharded, places[unit.name]):
                yield name, value, scale_of(name)
    for part in sharded.mask.split:  # of which nobody has all
        dense = part.allocate()
        deque(sharded.fetcher.fetch(places[part.name], partial(getattr, dense, "targets")), maxlen=0)
        part.scale(dense)
        yield from ((name, value, 1.0) for name, value in part.by_name(dense).items())


def _is_whole(tensor: HeldTensor) -> bool:
    return tensor.is_whole


def _fetched(sharded: ShardedModel, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit on a rank that lacks it, and nothing on others."""
    targets = sharded.mask.parts[place].allocate().targets
    deque(sharded.fetcher.fetch(place, lambda: targets), maxlen=0)
    yield from ((piece.parameter, value) for piece, value in targets.items())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """All of it: a DTensor is a buffer here, of which each rank has all."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor.mul_(scale)
