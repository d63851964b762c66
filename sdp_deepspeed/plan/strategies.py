"""Units of a model's branches for a strategy, and their costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import nn

from sdp_deepspeed.architectures.derivation import flops_per_element
from sdp_deepspeed.architectures.located_branch import LocatedBranch
from sdp_deepspeed.messages import KEY, quoted
from sdp_deepspeed.plan.plan import Plan
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
    """Divide a model's branches into units, in model order. Branches without trainable parameters are in no unit, nor
    those that cannot be cut if others of their type can.

    Args:
        strategy: "block", "neuron", or a mapping from branch types to these; others are shared.
        granularity: unit of the block strategy: "sublayer" makes each branch a unit, "layer" all branches of a layer.
        shared: regular expressions of names or parameters of units to share.
        neuron_groups: number of units of each branch without heads.
        num_subnetworks: default of `neuron_groups`.

    Raises:
        ValueError: a mapping with unknown branch types, only frozen branches, no branch that can be a block, no branch
            of a type that can be cut, more groups than neurons, groups without an effect, or a pattern that matches no
            unit or only a fraction of one.
    """
    by_type = _strategy_of_types(branches, strategy)
    trained = [branch for branch in branches if branch.is_trained and branch.description.name in by_type]
    if by_type and not trained:
        raise ValueError(
            f"{KEY}: all branches of the types {', '.join(map(repr, by_type))} are frozen, so there is nothing to "
            "divide; unfreeze some before this call, or remove the block"
        )
    _check_groups([branch for branch in trained if by_type[branch.description.name] == "neuron"], neuron_groups)
    grouped: dict[str, list[Piece]] = {}
    for branch in trained:
        match by_type[branch.description.name]:
            case "block" if branch.is_bypassed:
                grouped.setdefault(branch.name if granularity == "sublayer" else branch.layer, []).extend(branch.pieces)
            case "neuron" if not branch.uncuttable_reason:
                for name, cells in _cells_of_units(branch, neuron_groups or num_subnetworks).items():
                    grouped[name] = list(branch.pieces_of_cells(cells))
    units = [Unit(name, tuple(pieces)) for name, pieces in grouped.items()]
    if by_type and not units:
        raise ValueError(
            f"{KEY}.strategy: no branch of the model can be a block, since no skip connection is an identity; use "
            '"neuron", or a model with more layers'
        )
    patterns = {pattern: re.compile(pattern) for pattern in shared}
    frozen = [Unit(branch.name, branch.pieces) for branch in branches if not branch.is_trained]  # shared anyway
    for pattern, compiled in patterns.items():
        _check_pattern(pattern, compiled, units, frozen)
    left = [unit for unit in units if not any(_matches(compiled, unit) for compiled in patterns.values())]
    if not left:
        raise ValueError(f"{KEY}.shared: {list(patterns)} match all {len(units)} units; leave at least one unshared")
    return left


def uncut_branches(branches: Sequence[LocatedBranch], strategy: str | Mapping[str, str]) -> list[LocatedBranch]:
    """Branches that are shared because they cannot be cut, unlike others of their type."""
    by_type = _strategy_of_types(branches, strategy)
    return [b for b in branches if b.is_trained and b.uncuttable_reason and by_type.get(b.description.name) == "neuron"]


def constrained_branches(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> list[str | None]:
    """Branch of each unit of which every subnetwork needs a unit; None for blocks, and for branches with a shared group
    of neurons or head."""
    names = branches_of_units(units, branches)
    claimed: dict[str, int] = {}
    for unit in units:
        for piece in unit.pieces:
            claimed[piece.parameter] = claimed.get(piece.parameter, 0) + piece.length
    whole = set()
    for branch in branches:
        if branch.cut_tensors and claimed.get(branch.cut_tensors[0].parameter) == branch.cut_tensors[0].size:
            whole.add(branch.name)
    return [name if name in whole else None for name in names]


def layers_of_units(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> tuple[list[int], int]:
    """Layer index of each unit, among all layers with branches in model order (encoder first), and the number of these
    layers. Stacks of frozen layers, such as those of a teacher, do not count."""
    numbers: dict[str, int] = {}  # index of each layer
    layers: dict[str, int] = {}  # layer index of each parameter
    trained = {_stack(branch) for branch in branches if branch.is_trained}
    for branch in (branch for branch in branches if _stack(branch) in trained):
        index = numbers.setdefault(branch.layer, len(numbers))
        for piece in branch.pieces:
            layers[piece.parameter] = index
    return [layers[unit.pieces[0].parameter] for unit in units], len(numbers)


def _stack(branch: LocatedBranch) -> str:
    """Name of the module that contains the branch's layer and its neighbors."""
    return branch.layer.rpartition(".")[0]


def branches_of_units(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> list[str | None]:
    """Branch of each unit of neurons or heads; None for blocks."""
    names = {tensor.parameter: branch.name for branch in branches for tensor in branch.cut_tensors}
    of_units: list[str | None] = []
    for unit in units:
        cut = next((piece for piece in unit.pieces if piece.dim is not None), None)
        of_units.append(None if cut is None else names.get(cut.parameter))
    return of_units


def blocks_of_units(plan: Plan, branches: Sequence[LocatedBranch]) -> dict[int, list[LocatedBranch]]:
    """Branches of each block unit, by index of the unit.

    Raises:
        ValueError: a unit consists neither of whole branches, nor of neurons or heads.
    """
    return {
        index: _members(plan.units[index], branches)
        for index, name in enumerate(branches_of_units(plan.units, branches))
        if name is None
    }


def _members(unit: Unit, branches: Sequence[LocatedBranch]) -> list[LocatedBranch]:
    whole = {(piece.kind, piece.parameter) for piece in unit.pieces if piece.dim is None}
    members = [
        branch
        for branch in branches
        if branch.is_bypassed and branch.pieces and whole.issuperset((p.kind, p.parameter) for p in branch.pieces)
    ]
    left_over = {p.parameter for p in unit.pieces} - {p.parameter for branch in members for p in branch.pieces}
    if left_over or not members:
        raise ValueError(
            f"plan: unit {unit.name!r} is neither whole branches bypassed by an identity, nor neurons or heads of one "
            f"(left over: {quoted(sorted(left_over))})"
        )
    return members


def _strategy_of_types(branches: Sequence[LocatedBranch], strategy: str | Mapping[str, str]) -> dict[str, str]:
    types = list(dict.fromkeys(branch.description.name for branch in branches))
    if isinstance(strategy, str):
        return dict.fromkeys(types, strategy)
    unknown = [name for name in strategy if name not in types]
    if unknown:
        raise ValueError(
            f"{KEY}.strategy: {unknown[0]!r} is not a branch type of this model; it has {', '.join(map(repr, types))}"
        )
    return dict(strategy)


def _check_groups(branches: Sequence[LocatedBranch], neuron_groups: int | None) -> None:
    cut = [branch for branch in branches if not branch.uncuttable_reason]
    types = {branch.description.name for branch in cut}
    uncut = [branch for branch in branches if branch.description.name not in types]
    if uncut:
        blocks = {branch.description.name: "block" for branch in uncut}
        strategy = {branch.description.name: "neuron" for branch in branches} | blocks
        raise ValueError(
            f"{KEY}.strategy: {uncut[0].name!r} cannot be cut: {uncut[0].uncuttable_reason}. "
            f'Use "block" for the type {uncut[0].description.name!r}: "strategy": {json.dumps(strategy)}'
        )
    if neuron_groups is None:
        return
    divided = [
        branch.num_cells for branch in cut if branch.description.inner and branch.description.inner.heads is None
    ]
    if not divided:
        raise ValueError(f"{KEY}.neuron_groups: got {neuron_groups}, but only heads are cut here; remove it")
    if neuron_groups > min(divided):
        raise ValueError(
            f"{KEY}.neuron_groups: got {neuron_groups}, but a branch has {min(divided)} neurons; use fewer groups"
        )


def _cells_of_units(branch: LocatedBranch, num_groups: int) -> dict[str, range]:
    """Range of cells of each unit: single heads, or groups of neurons of about equal size."""
    assert branch.description.inner is not None
    if branch.description.inner.heads is not None:
        return {f"{branch.name}.head_{head}": range(head, head + 1) for head in range(branch.num_cells)}
    count = min(num_groups, branch.num_cells)
    edges = _edges(branch.num_cells, count, slack=1 if branch.has_stacked_matrices else 20)
    return {f"{branch.name}.group_{index}": range(edges[index], edges[index + 1]) for index in range(count)}


def _edges(num_cells: int, count: int, *, slack: int = 20) -> list[int]:
    """Boundaries of groups: multiples of 8, as 16-bit tensor cores need, or of the largest power of two that is at most
    1/`slack` of a group: 20 keeps sizes equal within 5%. Grouped products of experts require multiples, so there sizes
    may differ more."""
    step = 1
    while step < 8 and 2 * step * slack * count <= num_cells:
        step *= 2
    edges = [(2 * index * num_cells + count * step) // (2 * count * step) * step for index in range(count)]
    return [*edges, num_cells]


def _matches(pattern: re.Pattern[str], unit: Unit) -> bool:
    if pattern.search(unit.name):
        return True
    return any(pattern.search(piece.parameter) for piece in unit.pieces if piece.kind == "parameter")


def _check_pattern(pattern: str, compiled: re.Pattern[str], units: Sequence[Unit], frozen: Sequence[Unit]) -> None:
    if not any(_matches(compiled, unit) for unit in [*units, *frozen]):
        raise ValueError(
            f"{KEY}.shared: {pattern!r} matches no parameter of any unit; unit names are like {units[0].name!r}"
        )
    for unit in units:
        names = [piece.parameter for piece in unit.pieces if piece.kind == "parameter"]
        left = [name for name in names if not compiled.search(name)]
        if left and len(left) < len(names) and not compiled.search(unit.name):
            raise ValueError(
                f"{KEY}.shared: {pattern!r} matches only a part of {unit.name!r}, not {left[0]!r}; match the whole "
                f"unit, for example with {re.escape(unit.name)!r}"
            )


def unit_costs(model: nn.Module, units: Sequence[Unit]) -> list[UnitCost]:
    """Cost of each unit. FLOPs are counted in the traced pass, without attention scores (flops.py)."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    per_element = flops_per_element(model)
    return [_cost(unit, tensors, per_element) for unit in units]


def _cost(unit: Unit, tensors: Mapping[str, torch.Tensor], per_element: Mapping[str, Fraction]) -> UnitCost:
    num_parameters = num_bytes = 0
    flops = Fraction(0)
    for piece in unit.pieces:
        tensor = tensors[piece.parameter]
        elements = piece.num_elements(tensor.shape)
        num_bytes += elements * tensor.element_size()
        if piece.kind == "parameter":
            num_parameters += elements
            flops += elements * per_element[piece.parameter]
    return UnitCost(num_parameters, num_bytes, int(flops))
