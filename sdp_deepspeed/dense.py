"""The dense model when it is needed: streamed unit by unit, or resident (DESIGN.md section 3).

Streaming fetches each lacking unit just before it runs and frees it after. Every rank takes part, in the
order in which the model runs its units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .communicator import Communicator
from .fetch import UnitFetcher
from .gate import Gate, Step
from .masking import BlockMask, UnitModules
from .plan import Plan

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
        self._in_forward = False  # of the whole model
        self._automatic = False  # streaming was entered by a forward pass in evaluation mode
        self._fetcher = UnitFetcher(
            plan,
            communicator,
            shape_of=lambda piece: tuple(mask.shapes[piece.parameter]),
            dtype_of=lambda piece: mask.dtype_of(piece),
            device=next(model.parameters()).device,
        )
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
            self._in_forward = True
            return
        self._in_forward = True
        if self._mode == "resident":
            return
        self._gate.meet(Step.FORWARD)
        self._automatic = self._mode == "subnetwork"
        self._mode = "streaming"

    def _after_forward(self, *_: Any) -> None:
        self._in_forward = False
        if self._automatic:
            self._automatic = False
            self._mode = "subnetwork"
            self._release_all()

    def _before_unit(self, state: UnitModules) -> None:
        if self._mode == "streaming":
            self._fetch(state)
        elif not (state.present or self._in_forward or self._model.training or torch.is_grad_enabled()):
            raise RuntimeError(
                f"{state.unit.name} would be left out without a word: in evaluation mode only the model's own forward "
                "is the dense model. Call that, or inner modules on every rank inside engine.dense(resident=True)"
            )

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
        tensors = {p.parameter: t for p, t in zip(state.unit.pieces, self._mask.tensors_of(state), strict=True)}
        with torch.inference_mode(False):
            values = self._fetcher.fetch(state.index, tensors)
            if not state.held:
                self._mask.fill(state, [values[piece] for piece in state.unit.pieces])
