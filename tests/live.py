"""Bytes of all live tensors of this process, and the bytes that a plan lets a rank have."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from sdp_deepspeed.plan import Plan


class Watch:
    """Sees all tensors that come to life inside a `with` block, however they are reached.

    What was there before is frozen, so that a walk looks at new objects only and takes milliseconds.
    """

    def __enter__(self) -> Watch:
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()

    def settled_bytes(self, limit: int) -> int:
        """As `num_bytes`, once it is at most `limit`, or after five seconds.

        A gloo thread lets go of a collective's tensors only some time after it is done, later on a busy machine. What
        a rank keeps, it keeps for ever.
        """
        deadline = time.monotonic() + 5
        while (found := self.num_bytes()) > limit and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def num_bytes(self) -> int:
        """Bytes of the storages of all live tensors and of their gradients, each storage once."""
        gc.collect()
        found: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None and tensor.untyped_storage().nbytes():
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values())


def held_bytes(model: torch.nn.Module, plan: Plan, rank: int) -> int:
    """Weights and buffers, in the dense `model`'s dtype, that `rank` holds."""
    lacking = _names(plan, [u for u in range(len(plan.units)) if not plan.holds_rank(u, rank)])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if name not in lacking)


def stepped_elements(model: torch.nn.Module, plan: Plan, rank: int, *, stage: int) -> int:
    """Elements whose optimizer state `rank` keeps: all that it holds, at stage 1 its share among the holders."""
    elements = {name: p.numel() for name, p in model.named_parameters()}
    total = 0
    for index, unit in enumerate(plan.units):
        holders = plan.ranks_of(index)
        own = sum(elements.pop(piece.parameter, 0) for piece in unit.pieces)
        if rank in holders:
            total += own if stage == 0 else -(-own // len(holders))
    shared = sum(elements.values())
    return total + (shared if stage == 0 else -(-shared // len(plan.subnetwork_of_rank)))


def unit_bytes(model: torch.nn.Module, plan: Plan) -> list[int]:
    """Bytes of each unit."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    return [sum(sizes[name] for name in _names(plan, [index])) for index in range(len(plan.units))]


def _names(plan: Plan, units: list[int]) -> set[str]:
    return {piece.parameter for index in units for piece in plan.units[index].pieces}


def present_lacking(engine: Any) -> set[str]:
    """Units that this rank lacks in its subnetwork and that have storage now."""
    rank, plan = engine.communicator.rank, engine.plan
    tensors = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    return {
        unit.name
        for index, unit in enumerate(plan.units)
        if not plan.holds_rank(index, rank)
        if any(tensors[piece.parameter].untyped_storage().nbytes() for piece in unit.pieces)
    }
