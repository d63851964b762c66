"""The dense model when it is needed: streamed part by part, or resident (masking/README.md).

Streaming makes each part dense just before it runs, and only then. In the forward regime every rank takes part
(passes.py); in the backward regime each rank has all that it needs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.distributed.agreement import raise_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier, Phase
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.mixins import CUT, Hook, RefusePartial, mixed_in
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.masking.passes import DensePasses
from sdp_deepspeed.masking.replaced import ReplaceableTensors
from sdp_deepspeed.masking.viewed import Viewed, ViewedModel, ViewedPart

Mode = Literal["subnetwork", "streaming", "resident"]
_WAY = (
    "Call it on every rank inside `with engine.dense(resident=True):`, or use engine.save_pretrained or "
    "engine.save_checkpoint"
)


class DenseView:
    """Switches a masked module between its subnetwork and the dense model.

    Args:
        module: masked by `mask`, which was applied.
        dp_group: the data-parallel group, over which errors travel.
        barrier: where all ranks agree before each collective.
        passes: of the module, in the forward regime.
        evaluation: how parts come to be here.
    """

    def __init__(
        self,
        module: nn.Module,
        mask: Mask,
        dp_group: Communicator,
        barrier: MonitoredBarrier,
        passes: DensePasses,
        *,
        evaluation: str = "auto",
    ) -> None:
        self._module = module
        self._mask = mask
        self._dp_group = dp_group
        self._barrier = barrier
        self._passes = passes
        self.statistics = passes.statistics  # of its batch norms
        self._evaluation: str = evaluation
        self._mode: Mode = "subnetwork"
        self._replaceable: ReplaceableTensors | None = None
        self._in_forward = False  # of the whole model
        self._hooks: list[RemovableHandle] = []
        self._copies: WeakSet[nn.Module] = WeakSet()  # of what is a subnetwork's
        self._automatic = False  # streaming was entered by a forward pass in evaluation mode
        self.is_collective = bool(mask.parts) and not mask.model.stores_all  # forward regime: units travel
        self._first = {part.modules[0]: index for index, part in enumerate(mask.parts)}
        self._last = {part.modules[-1]: index for index, part in enumerate(mask.parts)}

    @property
    def is_whole(self) -> bool:
        """Whether we are inside a context in which all of the dense model is here."""
        return self._mode == "resident"

    @property
    def is_inside(self) -> bool:
        """Whether we are inside any such context."""
        return self._mode != "subnetwork"

    def num_partial_copies(self) -> int:
        """Copies of the module, or of parts of it, that exist and are of this rank's subnetwork."""
        if self._copies:
            gc.collect()  # those that nobody can reach
        return len(self._copies)

    @property
    def is_resident(self) -> bool:
        """Whether it will go back to what this rank's subnetwork has."""
        return self.is_whole and bool(self._mask.parts)

    def install(self) -> None:
        """Hook the module, so that its forward passes and state dicts mean what they should; called once."""
        if not self._mask.parts:
            if CUT in vars(self._module):
                self._mix_in(Viewed, self._module)
            return
        self._mix_in(ViewedModel, self._module)
        self._hooks += [
            self._module.register_forward_pre_hook(Hook(self._before_forward), prepend=True),
            self._module.register_forward_hook(Hook(self._after_forward), always_call=True),
            self._module.register_state_dict_pre_hook(Hook(lambda *_: self.become_resident())),
        ]
        for part in self._mask.parts:
            for module in {part.modules[0], part.modules[-1]}:
                self._mix_in(ViewedPart, module)
            if not part.whole:
                self._hooks += self._refuse_partial(part)

    def _refuse_partial(self, part: MaskedPart) -> list[RemovableHandle]:
        """Have state dicts of a part say that it is not all here."""
        refuse = RefusePartial(part.name, partial(getattr, part, "dense"), _WAY)
        modules = [inner for outer in part.modules for inner in outer.modules()]
        return [module.register_state_dict_post_hook(refuse) for module in modules]

    def uninstall(self) -> None:
        """Inverse of `install`, but for classes, which `mixins.unmix` changes back; never inside a view."""
        assert self._mode == "subnetwork", "the caller refuses this"
        self._passes.drop()
        for hook in self._hooks:
            hook.remove()

    def _mix_in(self, mixin: type[nn.Module], module: nn.Module) -> None:
        module.__class__ = mixed_in(mixin, type(module))
        object.__setattr__(module, "_sdp_view", self)

    @contextmanager
    def __call__(self, *, resident: bool | None = None) -> Iterator[None]:
        """All ranks enter and leave together. Inside, the module is the dense model.

        Args:
            resident: hold the whole model until the end (generation, state dict), or two parts; None: `evaluation`.
        """
        if self._mode == "resident" or (self._mode == "streaming" and not resident):
            yield
            return
        self.end_evaluation()
        previous, self._mode = self._mode, "streaming"
        evaluation = self._evaluation
        self._evaluation = "prefetch" if resident is False and evaluation != "stream" else evaluation
        try:
            if resident or not self._mask.parts:
                self._make_resident()
            yield
            self._wait(Phase.LEAVE)
            self._put_back()
        finally:
            if self._replaceable is not None:  # left by an error, which says enough
                self._replaceable.put_back()
                self._replaceable = None
            self._release_all()
            self._passes.drop()
            self._mode, self._evaluation = previous, evaluation

    def _put_back(self) -> None:
        """Take over the values of tensors that were replaced while the dense model was resident."""
        if self._replaceable is None:
            return
        error = self._replaceable.put_back()
        self._replaceable = None
        if self.is_collective:
            raise_on_all_ranks(self._dp_group, error)
        elif error is not None:
            raise error

    def end_evaluation(self) -> None:
        """Agree that evaluation is over, if forward passes in evaluation mode have used the dense model."""
        if self._barrier.num_forwards and self._mode == "subnetwork":
            self._passes.drop()
            self._barrier.wait(Phase.LEAVE)

    def wait_to_write(self) -> None:
        """What the ranks are about to write is a collective also where the dense model is none (backward regime)."""
        if not self.is_collective:
            self.meet(Phase.RESIDENT)

    def meet(self, phase: Phase) -> None:
        """All ranks begin the same, such as saving; that ends an evaluation. Batch norms have mean statistics after it.

        Raises:
            RuntimeError: on all ranks when they do not, naming ranks; on waiting ranks when one does not come.
        """
        self._passes.drop()
        self._barrier.wait(phase)
        if phase != Phase.LOAD:
            self.statistics.average()

    def _wait(self, phase: Phase) -> None:
        if self.is_collective:
            self._barrier.wait(phase)

    def _make_resident(self) -> None:
        self._wait(Phase.RESIDENT)
        with self._passes.all_at_once() if self.is_collective else nullcontext():
            for index in range(len(self._mask.parts)):
                self._fill(index)
        self._mode = "resident"
        self._replaceable = ReplaceableTensors(self._module)

    @torch.no_grad()
    def _release_all(self) -> None:
        for part in self._mask.parts:
            if part.filled and self._mode == "resident":
                part.take_over()
            self._release(part)

    def _wants_dense(self) -> bool:
        """In the backward regime also without gradients in training mode: generation there needs its cache."""
        return not torch.is_grad_enabled() and not (self._module.training and self.is_collective)

    def is_streaming(self) -> bool:
        """Whether a forward pass now makes parts dense one by one."""
        return self._mode == "streaming" or (self._mode != "resident" and self._wants_dense())

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        if self._automatic:  # the last forward was interrupted by what is no Exception, so that its hooks did not run
            self._after_forward()
        if not self._wants_dense():
            if self._mode == "streaming":
                raise RuntimeError(
                    f"{self._barrier.words.view} frees each unit after it ran, so there is nothing to differentiate; "
                    f"use model.eval() with torch.no_grad(){self._barrier.words.differentiate}"
                )
            self.end_evaluation()
            self._in_forward = True
            return
        self._in_forward = True
        if self._mode == "resident":
            return
        if self.is_collective:
            self._passes.begin(self._evaluation)
        self._automatic = self._mode == "subnetwork"
        self._mode = "streaming"

    def _after_forward(self, *_: Any) -> None:
        self._in_forward = False
        if self._automatic:
            self._automatic = False
            self._mode = "subnetwork"
            self._release_all()
        if self._passes.are_running:
            self._passes.end()

    def before(self, module: nn.Module) -> None:
        """`module` is about to run while parts become dense one by one."""
        index = self._first.get(module)
        if index is None:
            return
        part = self._mask.parts[index]
        alone = self._wants_dense() and not self._in_forward  # an inner module was called
        if self._mode == "streaming" or (alone and not part.dense and not self.is_collective):
            self._fill(index)
        elif alone and not part.dense:
            raise RuntimeError(
                f"{part.name} would be incomplete without a word: in evaluation mode only the model's own forward "
                f"is the dense model. Call that{self._barrier.words.inner}"
            )

    def after(self, module: nn.Module) -> None:
        """`module` ran, or failed to."""
        if module in self._last:
            self._release(self._mask.parts[self._last[module]])

    def become_resident(self) -> None:
        """Before a state dict or a copy, which take all weights: in a view that streams, all ranks call it."""
        if self._mode == "streaming":
            self._make_resident()

    def finish_copy(self, module: nn.Module, copied: nn.Module) -> None:
        """A module was copied: what is whole is nobody's subnetwork."""
        if not (self.is_whole or not self._mask.parts):
            self._copies -= set(copied.modules())  # inner ones count with it
            self._copies.add(copied)
            return
        for inner in copied.modules():
            vars(inner).pop(CUT, None)
        if module is self._module:
            self._mask.finish_copy(copied)

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        part = self._mask.parts[index]
        with torch.inference_mode(False):
            if self.is_collective:
                part.show(self._passes.take(index))
            else:
                part.fill(lambda _: None)

    @torch.no_grad()
    def _release(self, part: MaskedPart) -> None:
        if part.filled:
            with torch.inference_mode(False):
                if self._mode != "resident" and self._module.training:
                    part.keep_statistics()
                part.release()
