"""A plan applied to a live module: which pieces this rank keeps, trains, and where they lie from then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from sdp_deepspeed.architectures import Site, branches_of_units, constrained_branches
from sdp_deepspeed.layout.places import Places
from sdp_deepspeed.layout.segments import TensorInfo, pieces_by_tensor
from sdp_deepspeed.masking.block import BlockPart, output_names
from sdp_deepspeed.masking.compiled import check_forward, replaced_modules
from sdp_deepspeed.masking.neuron import NeuronPart
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit

CUT = "_sdp_cut"  # attribute of a model of which ranks hold parts only


class Mask:
    """Drops, narrows or freezes what a rank lacks in its module, for the whole run.

    Args:
        model: whole, on its final device, equal on all ranks.
        sites: its residual branches.
        tensors: its parameters in model order.
        plan: whose units are whole branches or neurons and heads of a branch.
        rank: in the data-parallel group.
        scales: whether the dense model's branches are scaled by their coverage.

    Attributes:
        places: where pieces lie in this rank's tensors.
        parts: what becomes dense together, the same on every rank; none if every rank holds everything.
        shapes: dense shapes by name.

    Raises:
        ValueError: a unit of the plan is neither, or a rank would have no neuron or head of a branch.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        tensors: Sequence[TensorInfo],
        plan: Plan,
        rank: int,
        *,
        scales: bool = False,
    ) -> None:
        live = dict(model.named_parameters()) | dict(model.named_buffers())
        self.shapes = {name: tensor.shape for name, tensor in live.items()}
        self.places = Places(live)
        self._model, self._plan, self._rank = model, plan, rank
        self._tensors = tuple(tensors)
        self._scale = plan.coverage if scales else 1.0
        self._pieces = pieces_by_tensor(tensors, plan)
        branches = branches_of_units(plan.units, sites)
        blocks = {index: members_of(plan.units[index], sites) for index, name in enumerate(branches) if name is None}
        neurons = {
            site.name: units
            for site in sites
            if (units := [index for index, name in enumerate(branches) if name == site.name])
        }
        _check_neurons(plan, sites, neurons)
        if self._scale != 1.0:
            for site in (site for members in blocks.values() for site in members):
                output_names(site, live)  # all that can be refused is refused before the first tensor is dropped
        self.parts: list[MaskedPart] = []
        if plan.coverage < 1:
            self._check_forwards(sites, [site for members in blocks.values() for site in members], neurons)
            object.__setattr__(model, CUT, True)
            model.zero_grad()  # gradients from before this engine are of the dense model
            self.parts = list(self._make_parts(sites, blocks, neurons))

    def _check_forwards(
        self, sites: Sequence[Site], blocks: Sequence[Site], neurons: Mapping[str, Sequence[int]]
    ) -> None:
        """In the forward regime lacking blocks run nothing; in the backward regime cut bodies run twice."""
        twice = self._plan.regime == "backward"
        changed = [site for site in sites if site.name in neurons] if twice else blocks
        for site in changed:
            check_forward(self._model, replaced_modules(self._model, site, twice=twice))

    def _make_parts(
        self, sites: Sequence[Site], blocks: Mapping[int, Sequence[Site]], neurons: Mapping[str, Sequence[int]]
    ) -> Iterator[MaskedPart]:
        """In the order in which the model runs them."""
        first = {members[0].name: index for index, members in blocks.items()}
        for site in sites:
            if site.name in neurons:
                yield self._neuron_part(site, neurons[site.name])
            elif (index := first.get(site.name)) is None:
                continue
            elif self._plan.regime == "forward":
                yield self._block_part(index, blocks[index])
            elif not self._plan.holds_rank(index, self._rank):
                self._freeze(self._plan.units[index])

    def _freeze(self, unit: Unit) -> None:
        for piece in unit.pieces:
            if piece.kind == "parameter":
                self.places.tensors[piece.parameter].requires_grad_(False)

    def _block_part(self, index: int, members: Sequence[Site]) -> BlockPart:
        held = self._plan.holds_rank(index, self._rank)
        unit = self._plan.units[index]
        return BlockPart(self._model, index, unit, members, held=held, shapes=self.shapes, scale=self._scale)

    def _neuron_part(self, site: Site, units: Sequence[int]) -> NeuronPart:
        pieces = {
            tensor.parameter: [
                (piece, self._rank in ranks) for piece, ranks in self._pieces["parameter", tensor.parameter]
            ]
            for tensor in site.cut_tensors
        }
        return NeuronPart(
            self._model,
            units,
            site,
            pieces,
            self.places,
            keeps_lacking=self._plan.regime == "backward",
            scales=self._scales(site, units),
        )

    def _scales(self, site: Site, units: Sequence[int]) -> dict[Piece, float]:
        """Of the units' part of the output projection."""
        outputs = {tensor.parameter for tensor in site.cut_tensors if tensor.cut.is_output}
        pieces = (piece for index in units for piece in self._plan.units[index].pieces)
        return {piece: self._scale for piece in pieces if piece.parameter in outputs} if self._scale != 1.0 else {}

    def dtype_of(self, piece: Piece) -> torch.dtype:
        """Of the piece's tensor, present or not."""
        return self.places.tensors[piece.parameter].dtype

    @contextmanager
    def trainable_as_built(self) -> Iterator[None]:
        """What requires gradients is what did before units were dropped or frozen."""
        parameters = dict(self._model.named_parameters())
        own = {name: parameter.requires_grad for name, parameter in parameters.items()}
        try:
            for info in self._tensors:
                parameters[info.name].requires_grad_(info.trainable)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.requires_grad_(own[name])

    def stored(self) -> dict[str, torch.Tensor]:
        """What this rank's subnetwork stores: tensors by dense name, lacking neurons by "<name> (lacking)"."""
        dropped = {
            piece.parameter
            for part in self.parts
            if isinstance(part, BlockPart) and not part.whole
            for piece in self._plan.units[part.units[0]].pieces
        }
        result = {name: tensor for name, tensor in self.places.tensors.items() if name not in dropped}
        return result | {f"{name} (lacking)": tensor for name, tensor in self.places.lacking.items()}


def members_of(unit: Unit, sites: Sequence[Site]) -> list[Site]:
    """The residual branches that a block unit is made of; ValueError if it is not made of whole ones."""
    whole = {(piece.kind, piece.parameter) for piece in unit.pieces if piece.dim is None}
    members = [site for site in sites if whole.issuperset((piece.kind, piece.parameter) for piece in site.pieces)]
    covered = {piece.parameter for site in members for piece in site.pieces}
    strange = sorted({piece.parameter for piece in unit.pieces} - covered)[:5]
    if strange or not members:
        raise ValueError(
            f"plan: unit {unit.name!r} is neither made of whole residual branches of this model nor of neurons or "
            f"heads of one (left over: {strange})"
        )
    return members


def _check_neurons(plan: Plan, sites: Sequence[Site], neurons: Mapping[str, Sequence[int]]) -> None:
    by_name = {site.name: site for site in sites}
    constrained = set(constrained_branches(plan.units, sites))
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


def _check_cells(unit: Unit, site: Site) -> None:
    """A neuron unit must take the same cells of all tensors of one branch."""
    output = next(tensor for tensor in site.cut_tensors if tensor.cut.is_output)
    width = output.size // site.num_cells
    expected: set[Piece] = set()
    for piece in unit.pieces:
        if piece.parameter == output.parameter:
            expected.update(site.pieces_of_cells(range(piece.start // width, (piece.start + piece.length) // width)))
    strange = sorted({piece.parameter for piece in expected.symmetric_difference(unit.pieces)})[:5]
    if strange:
        raise ValueError(
            f"plan: unit {unit.name!r} does not take the same whole neurons or heads of all tensors of {site.name!r} "
            f"(wrong: {strange})"
        )
