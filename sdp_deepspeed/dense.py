"""The dense model when it is needed: streamed unit by unit, or resident (DESIGN.md section 3).

Streaming fetches each lacking unit just before it runs and frees it after. Every rank takes part, in the
order in which the model runs its units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .communicator import Communicator
from .exchange import Exchange
from .gate import Gate, Step
from .masking import BlockMask, UnitModules
from .plan import Plan
from .segments import NOT_OPTIMIZED, Bucket, Fragment, Segment

Mode = Literal["subnetwork", "streaming", "resident"]


class DenseView:
    """Switches a masked module between its subnetwork and the dense model.

    Args:
        model: masked by `mask`.
        gate: where ranks agree before each collective.
    """

    def __init__(self, model: nn.Module, mask: BlockMask, plan: Plan, communicator: Communicator, gate: Gate) -> None:
        self._model = model
        self._mask = mask
        self._gate = gate
        self._mode: Mode = "subnetwork"
        self._automatic = False  # streaming was entered by a forward pass in evaluation mode
        device = next(model.parameters()).device
        self._buckets = _unit_buckets(mask, plan, communicator.size)
        every = [bucket for unit in self._buckets for buckets in unit for bucket in buckets]
        self._exchange = Exchange(every, communicator, device=device, dtype=torch.float32)
        self._whole = plan.num_holders == plan.num_subnetworks
        if not self._whole:
            self._install()

    def _install(self) -> None:
        self._model.register_forward_pre_hook(self._before_forward, prepend=True)
        self._model.register_forward_hook(self._after_forward, always_call=True)
        for state in self._mask.units:
            state.modules[0].register_forward_pre_hook(lambda *_, state=state: self._before_unit(state))
            state.modules[-1].register_forward_hook(lambda *_, state=state: self._after_unit(state))
            if not state.held:
                for module in (inner for outer in state.modules for inner in outer.modules()):
                    module.register_state_dict_pre_hook(lambda *_, state=state: self._refuse_partial(state))
        self._model.register_state_dict_pre_hook(lambda *_: self._before_state_dict())

    @contextmanager
    def __call__(self, *, resident: bool = False) -> Iterator[None]:
        """All ranks enter and leave together. Inside, the module is the dense model.

        Args:
            resident: hold the whole model (generation, state dict) instead of one lacking unit at a time.
        """
        if self._whole or self._mode == "resident" or (self._mode == "streaming" and not resident):
            yield
            return
        self.end_evaluation()
        previous, self._mode = self._mode, "streaming"
        try:
            if resident:
                self._make_resident()
            yield
            self._gate.meet(Step.LEAVE)
        finally:
            self._release_all()
            self._mode = previous

    def end_evaluation(self) -> None:
        """Agree that evaluation is over, if forward passes in evaluation mode have used the dense model."""
        if self._gate.num_forwards and self._mode == "subnetwork":
            self._gate.meet(Step.LEAVE)

    def _make_resident(self) -> None:
        self._gate.meet(Step.RESIDENT)
        for state in self._mask.units:
            self._fetch(state)
        self._mode = "resident"

    def _release_all(self) -> None:
        for state in self._mask.units:
            if state.present and not state.held:
                self._mask.release(state)

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        if model.training or torch.is_grad_enabled():
            if self._mode == "streaming":
                raise RuntimeError(
                    "engine.dense() frees each unit after it ran, so there is nothing to differentiate; use "
                    "model.eval() with torch.no_grad(), or engine.dense(resident=True)"
                )
            self.end_evaluation()
            return
        if self._mode == "resident":
            return
        self._gate.meet(Step.FORWARD)
        self._automatic = self._mode == "subnetwork"
        self._mode = "streaming"

    def _after_forward(self, *_: Any) -> None:
        if self._automatic:
            self._automatic = False
            self._mode = "subnetwork"
            self._release_all()

    def _before_unit(self, state: UnitModules) -> None:
        if self._mode == "streaming":
            self._fetch(state)

    def _after_unit(self, state: UnitModules) -> None:
        if self._mode == "streaming" and not state.held:
            self._mask.release(state)

    def _before_state_dict(self) -> None:
        if self._mode == "streaming":
            self._make_resident()

    def _refuse_partial(self, state: UnitModules) -> None:
        if not state.present:
            raise RuntimeError(
                f"this rank does not hold {state.unit.name}, so its state dict would be partial. Call it on every rank "
                "inside `with engine.dense(resident=True):`, or use engine.save_pretrained or engine.save_checkpoint"
            )

    @torch.no_grad()
    def _fetch(self, state: UnitModules) -> None:
        """One unit from its holders to all ranks that lack it."""
        values: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            for buckets in self._buckets[state.index]:
                values |= self._receive(state, buckets)
            if not state.held:
                self._mask.fill(state, [values[piece.parameter] for piece in state.unit.pieces])

    def _receive(self, state: UnitModules, buckets: list[Bucket]) -> dict[str, torch.Tensor]:
        """Flat tensors of one dtype by name, views of one buffer; nothing on ranks that hold the unit."""
        tensors = {p.parameter: t for p, t in zip(state.unit.pieces, self._mask.tensors_of(state), strict=True)}
        lengths = [0 if state.held else bucket.segments[0].num_elements for bucket in buckets]
        device = next(iter(tensors.values())).device
        flat = torch.empty(sum(lengths), dtype=buckets[0].segments[0].dtype, device=device)
        for bucket, out in zip(buckets, flat.split(lengths), strict=True):
            self._exchange.collect(bucket, tensors, receivers="others", out=out)
        sizes = {} if state.held else _sizes(buckets)
        return dict(zip(sizes, flat.split(list(sizes.values())), strict=True)) if sizes else {}


def _unit_buckets(mask: BlockMask, plan: Plan, size: int) -> list[list[list[Bucket]]]:
    """Per unit and dtype its buckets: one segment each, cut so that a holder never packs more than the unit's size."""
    count = itertools.count()
    result: list[list[list[Bucket]]] = []
    for state in mask.units:
        holders = plan.ranks_of(state.index)
        rounds = max(1, -(-(size - len(holders)) // len(holders)))
        result.append(
            [
                [Bucket(next(count), (segment,)) for segment in whole.split(-(-whole.num_elements // rounds))]
                for whole in _whole_segments(mask, state, holders)
            ]
        )
    return result


def _whole_segments(mask: BlockMask, state: UnitModules, holders: tuple[int, ...]) -> list[Segment]:
    by_dtype: dict[torch.dtype, list[Fragment]] = {}
    for piece, tensor in zip(state.unit.pieces, mask.tensors_of(state), strict=True):
        fragment = Fragment(piece, 0, piece.num_elements(mask.shapes[piece.parameter]))
        by_dtype.setdefault(tensor.dtype, []).append(fragment)
    return [Segment(NOT_OPTIMIZED, dtype, holders, tuple(fragments)) for dtype, fragments in by_dtype.items()]


def _sizes(buckets: list[Bucket]) -> dict[str, int]:
    """Elements of each tensor, in the order in which the buckets carry them."""
    sizes: dict[str, int] = {}
    for bucket in buckets:
        for fragment in bucket.segments[0].fragments:
            name = fragment.piece.parameter
            sizes[name] = sizes.get(name, 0) + fragment.stop - fragment.start
    return sizes
