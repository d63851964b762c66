"""Which units a strategy makes of a model's branches, and what each costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import nn

from sdp_deepspeed.architectures.active_experts import active_shares
from sdp_deepspeed.architectures.image_flops import flops_per_element
from sdp_deepspeed.architectures.located_branch import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.units import Piece, Unit, UnitCost


def units_of_branches(
    branches: Sequence[LocatedBranch],
    *,
    strategy: str | Mapping[str, str] = "block",
    granularity: str = "sublayer",
    shared: Iterable[str] = (),
    neuron_groups: int | None = None,
    num_subnetworks: int = 1,
) -> list[Unit]:
    """The model's units in model order.

    Args:
        strategy: "block", "neuron", or a mapping from parts (names of branches) to these; parts that a mapping does
            not name stay shared.
        granularity: of blocks: "sublayer" makes each branch a unit, "layer" all block branches of one layer together.
        shared: regular expressions; a unit whose name or whose parameters they match stays shared.
        neuron_groups: units that the neurons of each branch without heads are divided into.
        num_subnetworks: what `neuron_groups` is when it is None.

    Raises:
        ValueError: a mapping that names no branch of the model, no branch that can be a block, a branch whose neurons
            are not described, more groups than neurons, groups that nothing is divided into, a pattern that matches no
            unit's parameter, or only a part of a unit's parameters.
    """
    by_part = _strategy_of_parts(branches, strategy)
    _check_groups([branch for branch in branches if by_part.get(branch.description.name) == "neuron"], neuron_groups)
    grouped: dict[str, list[Piece]] = {}
    for branch in branches:
        match by_part.get(branch.description.name):
            case "block" if branch.is_bypassed:
                grouped.setdefault(branch.name if granularity == "sublayer" else branch.layer, []).extend(branch.pieces)
            case "neuron":
                for name, cells in _cells_of_units(branch, neuron_groups or num_subnetworks).items():
                    grouped[name] = list(branch.pieces_of_cells(cells))
    units = [Unit(name, tuple(pieces)) for name, pieces in grouped.items()]
    if by_part and not units:
        raise ValueError(
            f"{KEY}.strategy: no branch of the model can be a block, since none is bypassed by an identity (all skip "
            'connections project); use "neuron", or a model with more layers'
        )
    patterns = {pattern: re.compile(pattern) for pattern in shared}
    for pattern, compiled in patterns.items():
        _check_pattern(pattern, compiled, units)
    left = [unit for unit in units if not any(_matches(compiled, unit) for compiled in patterns.values())]
    if not left:
        raise ValueError(f"{KEY}.shared: {list(patterns)} match all {len(units)} units, so that none is left to divide")
    return left


def constrained_branches(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> list[str | None]:
    """For each unit the branch of which each subnetwork must keep a unit; None for blocks, and where a shared group of
    neurons or a shared head already gives every worker a part."""
    names = branches_of_units(units, branches)
    claimed: dict[str, int] = {}
    for unit in units:
        for piece in unit.pieces:
            claimed[piece.parameter] = claimed.get(piece.parameter, 0) + piece.length
    whole = {
        branch.name
        for branch in branches
        for tensor in branch.cut_tensors[:1]
        if claimed.get(tensor.parameter) == tensor.size
    }
    return [name if name in whole else None for name in names]


def layers_of_units(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> tuple[list[int], int]:
    """For each unit the index of its layer among all that have branches, in model order: an encoder's come first; and
    how many there are, those that have no unit included."""
    numbers = {layer: index for index, layer in enumerate(dict.fromkeys(branch.layer for branch in branches))}
    layers = {piece.parameter: numbers[branch.layer] for branch in branches for piece in branch.pieces}
    return [layers[unit.pieces[0].parameter] for unit in units], len(numbers)


def branches_of_units(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> list[str | None]:
    """For each unit of neurons or heads its branch; None for blocks."""
    names = {tensor.parameter: branch.name for branch in branches for tensor in branch.cut_tensors}
    cut = [next((piece.parameter for piece in unit.pieces if piece.dim is not None), None) for unit in units]
    return [names.get(parameter) if parameter is not None else None for parameter in cut]


def _strategy_of_parts(branches: Sequence[LocatedBranch], strategy: str | Mapping[str, str]) -> dict[str, str]:
    parts = list(dict.fromkeys(branch.description.name for branch in branches))
    if isinstance(strategy, str):
        return dict.fromkeys(parts, strategy)
    unknown = [part for part in strategy if part not in parts]
    if unknown:
        raise ValueError(
            f"{KEY}.strategy: {unknown[0]!r} is no part of this model; its parts are {', '.join(map(repr, parts))}"
        )
    return dict(strategy)


def _check_groups(branches: Sequence[LocatedBranch], neuron_groups: int | None) -> None:
    uncut = [branch for branch in branches if branch.uncuttable_reason]
    if uncut:
        blocks = {branch.description.name: "block" for branch in uncut}
        strategy = {branch.description.name: "neuron" for branch in branches} | blocks
        raise ValueError(
            f"{KEY}.strategy: the neurons or heads of {uncut[0].name!r} cannot be cut: {uncut[0].uncuttable_reason}. "
            f'Use "block" for the part {uncut[0].description.name!r}: "strategy": {json.dumps(strategy)}'
        )
    if neuron_groups is None:
        return
    divided = [
        branch.num_cells for branch in branches if branch.description.inner and branch.description.inner.heads is None
    ]
    if not divided:
        raise ValueError(f"{KEY}.neuron_groups: got {neuron_groups}, but only heads are cut here; remove it")
    if neuron_groups > min(divided):
        raise ValueError(
            f"{KEY}.neuron_groups: got {neuron_groups}, but a branch has {min(divided)} neurons; use fewer groups"
        )


def _cells_of_units(branch: LocatedBranch, num_groups: int) -> dict[str, range]:
    """Per unit its stretch of cells: single heads, or groups of neurons of about the same size."""
    assert branch.description.inner is not None
    if branch.description.inner.heads is not None:
        return {f"{branch.name}.head_{head}": range(head, head + 1) for head in range(branch.num_cells)}
    count = min(num_groups, branch.num_cells)
    edges = _edges(branch.num_cells, count, slack=1 if branch.description.experts else 20)
    return {f"{branch.name}.group_{index}": range(edges[index], edges[index + 1]) for index in range(count)}


def _edges(num_cells: int, count: int, *, slack: int = 20) -> list[int]:
    """Where groups begin and end: at multiples of 8, which 16-bit matrix units of GPUs ask for, or of the largest power
    of two that is at most the `slack`th part of a group: 20 keeps groups alike within 5%. Grouped products of experts
    do not run without, so there groups are less alike."""
    step = 1
    while step < 8 and 2 * step * slack * count <= num_cells:
        step *= 2
    edges = [(2 * index * num_cells + count * step) // (2 * count * step) * step for index in range(count)]
    return [*edges, num_cells]


def _matches(pattern: re.Pattern[str], unit: Unit) -> bool:
    if pattern.search(unit.name):
        return True
    return any(pattern.search(piece.parameter) for piece in unit.pieces if piece.kind == "parameter")


def _check_pattern(pattern: str, compiled: re.Pattern[str], units: Sequence[Unit]) -> None:
    if not any(_matches(compiled, unit) for unit in units):
        raise ValueError(
            f"{KEY}.shared: {pattern!r} matches no parameter of any unit; unit names are like {units[0].name!r}"
        )
    for unit in units:
        names = [piece.parameter for piece in unit.pieces if piece.kind == "parameter"]
        left = [name for name in names if not compiled.search(name)]
        if left and len(left) < len(names) and not compiled.search(unit.name):
            raise ValueError(
                f"{KEY}.shared: {pattern!r} matches only a part of {unit.name!r}, not {left[0]!r}; a unit is held "
                f"as a whole, so match its name, for example with {re.escape(unit.name)!r}"
            )


def unit_costs(model: nn.Module, units: Sequence[Unit]) -> list[UnitCost]:
    """Cost of each unit: weights of matrices count 2 FLOPs per token, attention scores are left out.

    Scores grow with the sequence length, which a model does not know; they shift all attention units alike. Of experts
    those count that a token uses, as if all were used alike. Of models that take images, weights count at as many
    positions of an image as they run at (`image_flops.py`).
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    per_element = flops_per_element(model)
    if per_element is None:
        shares = active_shares(model)
        per_element = {name: 2 * shares.get(name, Fraction(tensor.dim() > 1)) for name, tensor in tensors.items()}
    return [_cost(unit, tensors, per_element) for unit in units]


def _cost(unit: Unit, tensors: Mapping[str, torch.Tensor], per_element: Mapping[str, Fraction]) -> UnitCost:
    num_parameters = num_bytes = flops = 0
    for piece in unit.pieces:
        tensor = tensors[piece.parameter]
        elements = piece.num_elements(tensor.shape)
        num_bytes += elements * tensor.element_size()
        if piece.kind == "parameter":
            num_parameters += elements
            flops += int(elements * per_element[piece.parameter])
    return UnitCost(num_parameters, num_bytes, flops)
