"""Bytes of all live tensors of this process, and the bytes that a plan lets a rank have."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from benchmarks.common.held_bytes import storage_bytes
from benchmarks.common.measured_step import live_tensors
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece


class Watch:
    """Sees all tensors that come to life inside a `with` block, however they are reached.

    What was there before is frozen, so that a walk looks at new objects only and takes milliseconds.
    """

    def __enter__(self) -> Watch:
        self._was_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_frozen:
            gc.freeze()

    def settled_bytes(self, limit: int) -> int:
        """As `num_bytes`, once it is at most `limit`, or after a minute.

        A gloo thread lets go of a collective's tensors only some time after it is done, later on a busy machine. What
        a rank keeps, it keeps for ever.
        """
        deadline = time.monotonic() + 60
        while (found := self.num_bytes()) > limit and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def num_bytes(self) -> int:
        """Bytes of the storages of all live tensors and of their gradients, each storage once."""
        tensors = live_tensors()
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        return storage_bytes([*tensors, *gradients])


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def stored_bytes(model: torch.nn.Module, plan: Plan, rank: int) -> int:
    """Weights and buffers, in the dense `model`'s dtype, that `rank` holds; in the backward regime it stores all."""
    absent = [size for index, size in enumerate(unit_bytes(model, plan)) if not plan.holds_rank(index, rank)]
    whole = sum(tensor.nbytes for tensor in tensors_of(model).values())
    return whole if plan.regime == "backward" else whole - sum(absent)


def stepped_elements(model: torch.nn.Module, plan: Plan, rank: int) -> int:
    """Elements whose optimizer state `rank` keeps: its share among the holders."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    shared = sum(shape.numel() for shape in shapes.values())
    total = 0
    for index, unit in enumerate(plan.units):
        holders = plan.ranks_of(index)
        own = sum(p.num_elements(shapes[p.parameter]) for p in unit.pieces if p.kind == "parameter")
        shared -= own
        if rank in holders:
            total += -(-own // len(holders))
    return total - (-shared // plan.num_ranks)


def unit_bytes(model: torch.nn.Module, plan: Plan) -> list[int]:
    """Bytes of each unit."""
    tensors = tensors_of(model)

    def size(piece: Piece) -> int:
        tensor = tensors[piece.parameter]
        return piece.num_elements(tensor.shape) * tensor.element_size()

    return [sum(map(size, unit.pieces)) for unit in plan.units]


def stored_absent(engine: Any) -> set[str]:
    """Units that this rank lacks in its subnetwork and that its module has now: tensors with storage, or neurons and
    heads inside a tensor of the dense size. Blocks that are only frozen (backward regime) are always there."""
    rank, plan, shapes = engine._core.groups.rank, engine.plan, engine._core.mask.shapes
    tensors = tensors_of(engine.module)

    def is_there(piece: Piece) -> bool:
        tensor = tensors[piece.parameter]
        if piece.dim is None:
            return plan.regime == "forward" and tensor.untyped_storage().nbytes() > 0
        return tensor.shape == shapes[piece.parameter]

    return {
        unit.name
        for index, unit in enumerate(plan.units)
        if not plan.holds_rank(index, rank)
        if any(map(is_there, unit.pieces))
    }
