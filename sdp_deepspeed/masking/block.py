"""Forward masking, block strategy: a lacking branch has no storage, runs nothing and adds nothing.

The layer around it is untouched, with its own forward, checkpointing wrapper and hooks. Only the branch's
own modules change class: the body (of several modules the first) returns `Nothing`, which any tensor can be added to at
no cost, or at that of a copy where the model may write to the sum (in_place.py); the others pass their input on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mixins import Copied, Mixin, mix_in
from sdp_deepspeed.masking.nothing import Nothing
from sdp_deepspeed.masking.outputs import Outputs
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart, empty_like, stand_in
from sdp_deepspeed.units import Piece


class _LackingModule(Mixin):
    """Mixed in before a module's own class; itself again while its part is dense."""

    _sdp_part: BlockPart | Copied
    _sdp_outputs: Outputs
    _sdp_nothing: Nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sdp_part.dense:
            return super().forward(*args, **kwargs)
        first = next(iter((*args, *kwargs.values())))
        if not self._sdp_outputs.count:
            return self._sdp_nothing.handed_on(first)
        # A compiler knows tensors only, and leaves out that zeros are added.
        nothing = torch.zeros_like(first) if torch.compiler.is_compiling() else self._sdp_nothing.like(first)
        return self._sdp_outputs.around(nothing, kwargs)

    def _sdp_finish(self, copied: nn.Module) -> None:
        super()._sdp_finish(copied)
        if not self._sdp_part.dense:
            make_lacking(copied, Copied(), self._sdp_nothing, self._sdp_outputs)


def make_lacking(module: nn.Module, part: BlockPart | Copied, nothing: Nothing, outputs: Outputs) -> None:
    """Without outputs of its own, as a norm, it passes its first argument on."""
    mix_in(_LackingModule, module)
    object.__setattr__(module, "_sdp_part", part)
    object.__setattr__(module, "_sdp_outputs", outputs)
    object.__setattr__(module, "_sdp_nothing", nothing)


class BlockPart(MaskedPart):
    """One block unit on one rank, in the forward regime.

    Args:
        module: the whole model, equal on all ranks.
        model: the plan, and the module's tensors.
        index: of the unit in the plan.
        branches: the branches that the unit is made of, in the order in which they run.
        scale: of its output projections in the dense model.
        copies: whether the module may write to what its input is added to.
    """

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        index: int,
        branches: Sequence[LocatedBranch],
        *,
        scale: float = 1.0,
        copies: bool = False,
    ) -> None:
        unit, tensors = model.plan.units[index], model.views.tensors
        names = [name for branch in branches for name in branch.modules]
        super().__init__(unit.name, [index], [module.get_submodule(name) for name in names], whole=model.holds(index))
        self._outputs = [
            Outputs(count, branch.description.handed_on)
            for branch in branches
            for count in branch.description.num_outputs_of_modules
        ]
        self._tensors = {piece: tensors[piece.parameter] for piece in unit.pieces}
        self._shapes, self._formats = model.views.shapes, model.views.formats
        self._of_layers = {name for branch in branches for name in branch.parameters}
        self._scale = scale
        self._nothing = Nothing(unit.name, copies=copies)
        self._scaled = (
            [tensors[name] for branch in branches for name in output_names(branch, tensors)] if scale != 1.0 else []
        )
        self._unscaled: list[torch.Tensor] = []

    def apply(self) -> None:
        if not self.whole:
            for module, outputs in zip(self.modules, self._outputs, strict=True):
                make_lacking(module, self, self._nothing, outputs)
            self._drop()

    @property
    def num_bytes(self) -> int:
        scaled = sum(tensor.nbytes for tensor in self._scaled) if self.whole else 0
        lacking = () if self.whole else self._tensors.items()
        return scaled + sum(self._shapes[piece.parameter].numel() * tensor.element_size() for piece, tensor in lacking)

    def allocate(self) -> DenseTensors:
        targets: dict[Piece, torch.Tensor] = {}
        if not self.whole:
            for piece, tensor in self._tensors.items():
                shape, memory_format = self._shapes[piece.parameter], self._formats[piece.parameter]
                targets[piece] = empty_like(tensor, shape, memory_format)
        return DenseTensors(targets)

    def complete(self, dense: DenseTensors) -> None:
        values = {self._tensors[piece]: value for piece, value in dense.targets.items()}
        for tensor in self._scaled:
            values[tensor] = values[tensor].mul_(self._scale) if tensor in values else tensor.data * self._scale
        dense.values = values

    def show(self, dense: DenseTensors) -> None:
        self._unscaled = [tensor.data for tensor in self._scaled]
        for tensor, value in dense.values.items():
            tensor.data = value
        self.filled = True

    def take_over(self) -> None:
        if self.whole:
            for tensor, unscaled in zip(self._scaled, self._unscaled, strict=True):
                if not torch.equal(tensor.data, unscaled * self._scale):
                    unscaled.copy_(tensor.data / self._scale)

    def release(self) -> None:
        if self.whole:
            for tensor, unscaled in zip(self._scaled, self._unscaled, strict=True):
                tensor.data = unscaled
        else:
            self._drop()
        self._unscaled = []
        self.filled = False

    def stand_ins(self) -> dict[torch.Tensor, torch.Tensor]:
        lacking = () if self.whole else self._tensors.items()
        return {tensor: stand_in(tensor, self._shapes[piece.parameter]) for piece, tensor in lacking}

    def _drop(self) -> None:
        """Give the storage of a lacking unit back. Where a layer itself multiplies with a parameter, which compilers do
        with zeros, one zero is read as all of it."""
        for piece, tensor in self._tensors.items():
            of_layer = piece.parameter in self._of_layers
            with torch.inference_mode(False):
                data = torch.zeros(int(of_layer), dtype=tensor.dtype, device=tensor.device)
                tensor.data = data.expand(self._shapes[piece.parameter]) if of_layer else data
            tensor.requires_grad_(False)


def check_scalable(module: nn.Module, branch: LocatedBranch) -> None:
    """Whether a factor on a branch's output projection is one on what the branch adds.

    Raises:
        ValueError: a norm between the two would undo it.
    """
    after = [f"{branch.layer}.{path}" for path in branch.description.after]
    after += [f"{branch.root}.{path}" for path in (branch.description.inner.tail if branch.description.inner else ())]
    for name in after:
        kind = type(module.get_submodule(name)).__name__
        if "norm" in kind.lower():
            raise ValueError(
                f"{KEY}.dense_branch_scale: {name} ({kind}) normalizes what {branch.name!r} computes "
                'before it is added, so a factor on its output projection would have no effect; use "none"'
            )


def output_names(branch: LocatedBranch, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Weights and biases of a branch's output projections.

    Raises:
        ValueError: the branch's description does not say which layer that is.
    """
    cuts = [cut for cut in branch.description.inner.cuts if cut.is_output] if branch.description.inner else []
    if not cuts:
        raise ValueError(
            f"{KEY}.dense_branch_scale: the description of the branch {branch.description.name!r} names no "
            "output projection that could be scaled; register it with architectures.InnerLayers"
        )
    names = [(cut, *replace(cut, module=f"{branch.root}.{cut.module}").names(tensors)) for cut in cuts]
    present = [name for _, *pair in names for name in pair if name in tensors]
    if not present or not all(weight in tensors or cut.optional for cut, weight, _ in names):
        raise ValueError(
            f"{KEY}.dense_branch_scale: the description of {branch.name!r} names no output projection of it that could "
            f"be scaled; register it with architectures.InnerLayers. {branch.uncuttable_reason}".rstrip()
        )
    return present
