"""Support for `deepspeed.utils.safe_get_full_*` and `safe_set_full_*` on our engine's parameters: fp32 weights,
gradients and optimizer state of single dense parameters.

These functions are collective, with equal arguments. With tensor parallelism, "dense" means the part of this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.engine.zero_optimizer import SubnetworkOptimizer
from sdp_deepspeed.messages import listed
from sdp_deepspeed.parallel.boxes import Box, shard_boxes
from sdp_deepspeed.parallel.consistency import gather_objects
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer

Quantity = Literal["weight", "gradient", "state"]


def install_full_access(parameter: nn.Parameter, name: str, optimizer: SubnetworkOptimizer) -> None:
    """Install the attributes that DeepSpeed's functions use."""
    access, target = _Access(optimizer, name), parameter
    vars(target).update(
        _hp_mapping=None,  # if present, DeepSpeed's functions call the methods
        _hp_grad=access,  # if not None, they do not return this rank's local gradient
        get_full_hp_param=access.get,
        set_full_hp_param=access.set,
        get_full_hp_grad=access.get_gradient,
        set_full_hp_grad=access.set_gradient,
    )


class _Access:
    """The methods of one Parameter. Holds weak references; a pickled Parameter has no engine."""

    def __init__(self, optimizer: SubnetworkOptimizer | None, name: str) -> None:
        self._of_engine = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        optimizer = self._of_engine()
        mask = None if optimizer is None else optimizer.sharded.mask
        if mask is not None and mask.is_applied and mask.is_partial(self._name):
            raise RuntimeError(
                f"{self._name}: this rank holds only a part, so it cannot be pickled; save the state dict inside "
                "`with engine.dense():` on all ranks"
            )
        return _Access, (None, self._name)

    def _optimizer(self) -> ShardedOptimizer:
        optimizer = self._of_engine()
        if optimizer is None:
            raise RuntimeError(f"the engine that trained {self._name!r} no longer exists")
        return optimizer.sharded

    def get(self, optim_state_key: str | None = None) -> torch.Tensor:
        kind: Quantity = "weight" if optim_state_key is None else "state"
        return read_full(self._optimizer(), self._name, kind, optim_state_key or "")

    def set(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        kind: Quantity = "weight" if optim_state_key is None else "state"
        write_full(self._optimizer(), self._name, value, kind, optim_state_key or "")

    def get_gradient(self) -> torch.Tensor:
        return read_full(self._optimizer(), self._name, "gradient")

    def set_gradient(self, value: torch.Tensor) -> None:
        write_full(self._optimizer(), self._name, value, "gradient")


@torch.no_grad()
def read_full(optimizer: ShardedOptimizer, name: str, kind: Quantity = "weight", key: str = "") -> torch.Tensor:
    """Read values of a dense parameter, on the device of the weights, in fp32; local gradients in their dtype.

    Args:
        kind: "weight", "gradient" or "state". "gradient" averages the gradients, after the last micro-step; the next
            call must be a step. Before that at stages 0 and 1, and inside `coalesce_grad_reduction`, it is what this
            rank has accumulated, with zeros for what it lacks, without a collective.
        key: of "state".

    Raises:
        ValueError: on all ranks, if there is no such state.
        RuntimeError: gradients are still being accumulated (stage 2).
    """
    if kind == "gradient" and optimizer.reducer.is_local:
        return _local_gradient(optimizer, name)
    _prepare(optimizer, name, kind, key)
    like = optimizer.mask.parameters[name]
    dense = torch.zeros(optimizer.mask.shapes[name], dtype=torch.float32, device=like.device)
    for box, values in _values(optimizer, name, kind, key):
        box.of(dense).copy_(values)
    group = optimizer.groups.data_parallel
    if group.size > 1:
        dist.all_reduce(dense, group=group.process_group)
    return dense


def _local_gradient(optimizer: ShardedOptimizer, name: str) -> torch.Tensor:
    mask, slices = optimizer.mask, optimizer.reducer.local_gradient(name)
    like = slices[0] if slices else mask.parameters[name]
    dense = torch.zeros(mask.shapes[name], dtype=like.dtype, device=like.device)
    for piece, values in zip(mask.held_pieces(name), slices, strict=False):  # no slices: no gradient
        piece.narrow(dense).copy_(values)
    return dense


@torch.no_grad()
def write_full(
    optimizer: ShardedOptimizer, name: str, value: torch.Tensor, kind: Quantity = "weight", key: str = ""
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
    _prepare(optimizer, name, kind, key)
    for box, values in _values(optimizer, name, kind, key):
        values.copy_(box.of(value))
    if kind == "weight":
        for piece in optimizer.mask.stored_pieces(name):
            optimizer.mask.view(piece).copy_(piece.narrow(value))


def _prepare(optimizer: ShardedOptimizer, name: str, kind: Quantity, key: str) -> None:
    if kind == "gradient":
        if not optimizer.reducer.is_last_micro_step:
            raise RuntimeError("gradients are averaged after the last micro-step; read or set them before step() only")
        optimizer.reducer.finish_step()
    elif kind == "state":
        of_name = (bucket for bucket in optimizer.held if name in bucket.layout.names)
        parameters = [parameter for bucket in of_name for parameter in bucket.parameters]
        states = [(parameter, optimizer.optimizer.state.get(parameter, {})) for parameter in parameters]
        keys = {k for p, state in states for k, v in state.items() if torch.is_tensor(v) and v.shape == p.shape}
        known = sorted(set().union(*gather_objects(keys, optimizer.groups.control)))
        if key not in known:
            words = f"it has {listed(known)}" if known else "before the first step there is none"
            raise ValueError(f"{name!r}: the optimizer has no state {key!r} with one value per element: {words}")


def _values(optimizer: ShardedOptimizer, name: str, kind: Quantity, key: str) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes that this rank owns of a parameter, with views of their values; nothing for missing state."""
    for bucket in (bucket for bucket in optimizer.held if name in bucket.layout.names):
        if kind == "gradient":
            bucket.expose_average()
        for box in shard_boxes(bucket):
            state = optimizer.optimizer.state.get(box.tensor, {})
            tensor = {"weight": box.tensor, "gradient": box.tensor.grad, "state": state.get(key)}[kind]
            if box.name == name and tensor is not None:
                yield box, box.view(tensor)
