"""Read and write fp32 weights, gradients and optimizer state of single dense parameters, as
`deepspeed.utils.safe_get_full_*` and `safe_set_full_*` do.

These functions are collective, with equal arguments. With tensor parallelism, "dense" means the part of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist

from sdp_deepspeed.messages import listed
from sdp_deepspeed.parallel.consistency import gather_objects
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.shard_parts import ShardPart, shard_parts

Kind = Literal["weight", "gradient", "state"]


@torch.no_grad()
def read_full(optimizer: ShardedOptimizer, name: str, kind: Kind = "weight", key: str = "") -> torch.Tensor:
    """Read values of a dense parameter in fp32, on the device of the weights.

    Args:
        name: dense name of a trained parameter.
        kind: "weight", "gradient" or "state". "gradient" averages the gradients, after the last micro-step; the next
            call must be a step.
        key: key in the optimizer's state.

    Raises:
        ValueError: on all ranks, if there is no such state.
        RuntimeError: gradients are still being accumulated.
    """
    _prepare(optimizer, kind, key)
    like = optimizer.mask.parameters[name]
    dense = torch.zeros(optimizer.mask.shapes[name], dtype=torch.float32, device=like.device)
    for part, values in _values(optimizer, name, kind, key):
        flat = dense.new_zeros(part.slice.num_elements)
        flat[part.start : part.stop] = values.to(flat)
        part.slice.piece.narrow(dense).add_(flat.view(part.slice.shape))
    group = optimizer.groups.data_parallel
    if group.size > 1:
        dist.all_reduce(dense, group=group.process_group)
    return dense


@torch.no_grad()
def write_full(
    optimizer: ShardedOptimizer, name: str, value: torch.Tensor, kind: Kind = "weight", key: str = ""
) -> None:
    """Write values of a dense parameter; each rank writes what it steps, and for weights what it stores.

    Raises:
        ValueError: on all ranks, if the value has a different shape.
    """
    if value.shape != optimizer.mask.shapes[name]:
        expected = tuple(optimizer.mask.shapes[name])
        raise ValueError(
            f"{name!r} has shape {expected}, the value {tuple(value.shape)}; pass the whole parameter's values"
        )
    _prepare(optimizer, kind, key)
    for part, values in _values(optimizer, name, kind, key):
        values.copy_(part.slice.piece.narrow(value).reshape(-1)[part.start : part.stop])
    for piece, _ in optimizer.mask.pieces[name] if kind == "weight" else ():
        if optimizer.mask.stored(piece):
            optimizer.mask.view(piece).copy_(piece.narrow(value))


def _prepare(optimizer: ShardedOptimizer, kind: Kind, key: str) -> None:
    if kind == "gradient":
        if not optimizer.reducer.is_last_micro_step:
            raise RuntimeError("gradients are averaged after the last micro-step; read or set them before step() only")
        optimizer.reducer.finish()
    elif kind == "state":
        parameters = [parameter for bucket in optimizer.held for parameter in bucket.parameters]
        states = [(parameter, optimizer.optimizer.state.get(parameter, {})) for parameter in parameters]
        own = {k for p, state in states for k, v in state.items() if torch.is_tensor(v) and v.shape == p.shape}
        known = sorted(set().union(*gather_objects(own, optimizer.groups.control)))
        if key not in known:
            words = f"it has {listed(known)}" if known else "before the first step there is none"
            raise ValueError(f"the optimizer has no state {key!r} with one value per element: {words}")


def _values(optimizer: ShardedOptimizer, name: str, kind: Kind, key: str) -> Iterator[tuple[ShardPart, torch.Tensor]]:
    """Yield flat views of what this rank owns of a parameter; nothing for missing state."""
    for bucket in optimizer.held:
        if name in bucket.layout.names:
            if kind == "gradient":
                bucket.set_gradients(bucket.average)
            for part in shard_parts(bucket):
                state = optimizer.optimizer.state.get(part.parameter, {})
                tensor = {"weight": part.parameter, "gradient": part.parameter.grad, "state": state.get(key)}[kind]
                if part.slice.piece.parameter == name and tensor is not None:
                    yield part, part.of(tensor)
