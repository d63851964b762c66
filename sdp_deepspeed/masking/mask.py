"""A plan applied to a live module: which pieces this rank keeps, trains, and where they lie from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units, constrained_branches
from sdp_deepspeed.config import KEY
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.block import BlockPart, check_scalable, output_names
from sdp_deepspeed.masking.compiled import check_forward, replaced_modules
from sdp_deepspeed.masking.experts import (
    RefuseRouterLoss,
    check_grouped_products,
    check_noise,
    check_router_losses,
)
from sdp_deepspeed.masking.in_place import may_write_in_place
from sdp_deepspeed.masking.mixins import CUT
from sdp_deepspeed.masking.neuron import NeuronPart
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit


class Mask:
    """Drops, narrows or freezes what a rank lacks in its module, for the whole run; `apply` does it.

    Args:
        module: whole, on its final device, equal on all ranks.
        model: the plan, whose units are whole branches or neurons and heads of a branch, and the module's tensors.
        branches: the module's residual branches.
        scales: whether the dense model's branches are scaled by their coverage.

    Attributes:
        parts: what becomes dense together, the same on every rank; none if every rank holds everything.
        block_part: what is made of a block unit in the forward regime.
        neuron_part: what is made of a branch whose neurons or heads are cut.
    """

    block_part: type[BlockPart] = BlockPart
    neuron_part: Callable[..., MaskedPart] = NeuronPart

    def __init__(
        self, module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch], *, scales: bool = False
    ) -> None:
        self.model = model
        self.parts: list[MaskedPart] = []
        self._module = module
        self._hooks: list[RemovableHandle] = []
        self._branches = list(branches)
        self._scales = scales

    def apply(self) -> None:
        """Cut the module down to this rank's subnetwork. All that can be refused is refused before the first change.

        Raises:
            ValueError: as `check`.
        """
        blocks, neurons, refusal = self.check()
        if self.model.plan.is_whole:
            return
        self._mark()
        self._module.zero_grad()  # gradients from before this engine are of the dense model
        for part in self._make_parts(blocks, neurons):
            part.apply()
            self.parts.append(part)
        if refusal:
            hook = RefuseRouterLoss(refusal, self.parts)
            self._hooks.append(self._module.register_forward_pre_hook(hook, with_kwargs=True))

    def check(self) -> tuple[Mapping[int, Sequence[LocatedBranch]], Mapping[str, Sequence[int]], str]:
        """Refuse what cannot be applied; the module stays as it is.

        Returns:
            The branches of each block unit that some lack, by its index in the plan; the units of each branch whose
            neurons or heads some lack; and the message for an auxiliary loss that not every subnetwork has.

        Raises:
            ValueError: a unit of the plan is neither, or a rank would have no neuron or head of a branch.
        """
        plan, branches = self.model.plan, self._branches
        names = branches_of_units(plan.units, branches)
        cut = [index for index in range(len(names)) if plan.coverage_of(index) < 1]
        blocks = {index: members_of(plan.units[index], branches) for index in cut if names[index] is None}
        is_cut = {names[index] for index in cut}
        neurons = {
            branch.name: [index for index, name in enumerate(names) if name == branch.name]
            for branch in branches
            if branch.name in is_cut
        }
        _check_neurons(plan, branches, neurons)
        members = [branch for members in blocks.values() for branch in members]
        if plan.is_whole:
            return blocks, neurons, ""
        if self._scales:
            self._check_scales(members, neurons)
        self._check_forwards(members, neurons)
        if plan.regime == "backward":
            check_noise(self._module, branches, neurons)
        check_grouped_products(self._module, plan, branches, neurons)
        return blocks, neurons, check_router_losses(self._module, plan, blocks, branches)

    @contextmanager
    def shaped_as_built(self) -> Iterator[None]:
        """The module has the shapes, counts and trainability of the dense model, and stand-ins without values for what
        this rank lacks: enough to plan it, not to run it."""
        for part in self.parts:
            part.show(DenseTensors({}, part.stand_ins()))
        try:
            with self.trainable_as_built():
                yield
        finally:
            for part in self.parts:
                part.release()

    def undo(self) -> dict[str, torch.Tensor]:
        """Make the module whole again, of the same objects as before `apply`, but without values where this rank lacks
        some; `mixins.unmix` and `allocate` do the rest.

        Returns:
            By dense name the tensors that have stand-ins now.
        """
        without = {tensor for part in self.parts for tensor in part.stand_ins()}
        for part in self.parts:
            part.undo()
        for hook in self._hooks:
            hook.remove()
        for info in self.model.tensors:
            if info.trainable:
                self.model.views.tensors[info.name].requires_grad_(True)
        return {name: tensor for name, tensor in self.model.views.tensors.items() if tensor in without}

    def _mark(self) -> None:
        """Say on all ranks which modules are not whole on all of them."""
        plan = self.model.plan
        units = [unit for index, unit in enumerate(plan.units) if len(plan.holders[index]) < plan.num_subnetworks]
        names = {piece.parameter.rpartition(".")[0] for unit in units for piece in unit.pieces}
        for name in ("", *sorted(names)):
            object.__setattr__(self._module.get_submodule(name), CUT, True)

    def finish_copy(self, copied: nn.Module) -> None:
        """Make a copy of the whole module, which was dense, a model that nobody has cut or frozen."""
        parameters = dict(copied.named_parameters())
        for info in self.model.tensors:
            parameters[info.name].requires_grad_(info.trainable)

    def _check_scales(self, blocks: Sequence[LocatedBranch], neurons: Mapping[str, Sequence[int]]) -> None:
        """Of the branches that are cut: the factor of others is 1."""
        for branch in blocks:
            output_names(branch, self.model.views.tensors)
        for branch in (*blocks, *[branch for branch in self._branches if branch.name in neurons]):
            check_scalable(self._module, branch)

    def _check_forwards(self, blocks: Sequence[LocatedBranch], neurons: Mapping[str, Sequence[int]]) -> None:
        """In the forward regime lacking blocks run nothing; in the backward regime cut bodies run twice."""
        twice = self.model.plan.regime == "backward"
        changed = [branch for branch in self._branches if branch.name in neurons] if twice else blocks
        for branch in changed:
            inner = branch.description.inner
            if twice and inner and inner.undivided_reason:
                raise ValueError(
                    f"{KEY}.strategy: {branch.name!r} in the backward regime: {inner.undivided_reason}; use "
                    f'"block" for the part {branch.description.name!r}, or the forward regime'
                )
            check_forward(self._module, replaced_modules(self._module, branch, twice=twice))

    def _make_parts(
        self, blocks: Mapping[int, Sequence[LocatedBranch]], neurons: Mapping[str, Sequence[int]]
    ) -> Iterator[MaskedPart]:
        """In the order in which the model runs them; each is applied before the next is made."""
        first = {members[0].name: index for index, members in blocks.items()}
        skips = self.model.plan.regime == "forward" and bool(blocks)
        copies = skips and may_write_in_place(self._module, self._branches)
        for branch in self._branches:
            if branch.name in neurons:
                yield self.neuron_part(self._module, self.model, branch, neurons[branch.name], scales=self._scales)
            elif (index := first.get(branch.name)) is None:
                continue
            elif self.model.plan.regime == "forward":
                scale = self.model.plan.coverage_of(index) if self._scales else 1.0
                yield self.block_part(self._module, self.model, index, blocks[index], scale=scale, copies=copies)
            elif not self.model.holds(index):
                self._freeze(self.model.plan.units[index])

    def _freeze(self, unit: Unit) -> None:
        for piece in unit.pieces:
            if piece.kind == "parameter":
                self.model.views.tensors[piece.parameter].requires_grad_(False)

    @contextmanager
    def trainable_as_built(self) -> Iterator[None]:
        """What requires gradients is what did before units were dropped or frozen."""
        parameters = dict(self._module.named_parameters())
        required_grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
        try:
            for info in self.model.tensors:
                parameters[info.name].requires_grad_(info.trainable)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.requires_grad_(required_grad[name])

    def dropped_names(self) -> set[str]:
        """Dense names of tensors of which this rank stores nothing."""
        return {
            piece.parameter
            for part in self.parts
            if isinstance(part, BlockPart) and not part.whole
            for piece in self.model.plan.units[part.units[0]].pieces
        }

    def stored(self) -> dict[str, torch.Tensor]:
        """What this rank's subnetwork stores: tensors by dense name, lacking neurons by "<name> (lacking)"."""
        dropped = self.dropped_names()
        result = {name: tensor for name, tensor in self.model.views.tensors.items() if name not in dropped}
        return result | {f"{name} (lacking)": tensor for name, tensor in self.model.views.lacking.items()}


def members_of(unit: Unit, branches: Sequence[LocatedBranch]) -> list[LocatedBranch]:
    """The residual branches that a block unit is made of; ValueError if it is not made of whole ones."""
    whole = {(piece.kind, piece.parameter) for piece in unit.pieces if piece.dim is None}
    members = [
        branch
        for branch in branches
        if branch.is_bypassed and whole.issuperset((piece.kind, piece.parameter) for piece in branch.pieces)
    ]
    covered = {piece.parameter for branch in members for piece in branch.pieces}
    left_over = sorted({piece.parameter for piece in unit.pieces} - covered)
    if left_over or not members:
        raise ValueError(
            f"plan: unit {unit.name!r} is neither made of whole residual branches of this model, each bypassed by "
            f"an identity, nor of neurons or heads of one (left over: {quoted(left_over)})"
        )
    return members


def _check_neurons(plan: Plan, branches: Sequence[LocatedBranch], neurons: Mapping[str, Sequence[int]]) -> None:
    by_name = {branch.name: branch for branch in branches}
    constrained = set(constrained_branches(plan.units, branches))
    for name, units in neurons.items():
        for index in units:
            _check_cells(plan.units[index], by_name[name])
        if name not in constrained:
            continue
        without = set(range(plan.num_subnetworks)).difference(*[plan.holders[index] for index in units])
        if without:
            raise ValueError(
                f"plan: subnetwork {min(without)} has no unit of {name!r}: a worker keeps at least one group of "
                "neurons or one head of each branch"
            )


def _check_cells(unit: Unit, branch: LocatedBranch) -> None:
    """A neuron unit must take the same cells of all tensors of one branch."""
    output = next(tensor for tensor in branch.cut_tensors if tensor.cut.is_output)
    width = output.size // branch.num_cells
    expected: set[Piece] = set()
    for piece in unit.pieces:
        if piece.parameter == output.parameter:
            expected.update(branch.pieces_of_cells(range(piece.start // width, (piece.start + piece.length) // width)))
    differing = sorted({piece.parameter for piece in expected.symmetric_difference(unit.pieces)})
    if differing:
        raise ValueError(
            f"plan: unit {unit.name!r} does not take the same whole neurons or heads of all tensors of {branch.name!r} "
            f"(wrong: {quoted(differing)})"
        )
