"""Proof by numbers that neurons and heads of derived branches may be absent.

A layer of which the mask holds every second group of neurons or heads computes the same as the layer in which all rows
and columns of the others are zero, and so do the gradients of what it holds; in the backward regime, the same as the
whole layer. Counts that a forward reads (`num_heads`) are found by trying those that the pass reads, the fewest that
are enough. Dropout drops nothing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import InnerLayers, attribute, is_nested
from sdp_deepspeed.architectures.cells import NoCells, UnevenBlocks, propose_cells
from sdp_deepspeed.architectures.located_branch import with_cells
from sdp_deepspeed.architectures.streams import Layer
from sdp_deepspeed.architectures.trace import Trace
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.replayed_layer import LAYER, OUTPUT, ReplayedLayer, difference, first_line
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Regime, Unit

_MAX_ELEMENTS = 2**28  # of a branch that is computed
_MAX_SEEDS = 4
_MAX_TRIALS = 64
_TOLERANCE = 1e-3  # of fp32, behind norms over few elements
_NUM_GROUPS = 5
_Choice = tuple[str, str]  # a field of InnerLayers, and a name in it


@dataclass(frozen=True)
class Cells:
    """What is known of the neurons or heads of a branch.

    Args:
        inner: None if it cannot be cut.
        counts: integers that its forward reads, by attribute path, and their values. For a layer in which they differ,
            nothing is proven.
    """

    inner: InnerLayers | None = None
    number: int = 0
    reason: str = ""
    counts: tuple[tuple[str, int], ...] = ()

    def applies_to(self, root: nn.Module) -> bool:
        return all(_value(root, path) == value for path, value in self.counts)


def _value(root: nn.Module, path: str) -> Any:
    try:
        return attribute(root, path)
    except AttributeError:
        return None


def cells_of(traced: Trace, layer: Layer, branch: LocatedBranch) -> Cells:
    """Propose and prove the neurons or heads of a derived branch.

    Args:
        branch: with the names of `ReplayedLayer`.
    """
    inside = {piece.parameter.removeprefix(f"{LAYER}.") for piece in branch.pieces}
    if sum(p.numel() for name, p in layer.module.named_parameters() if name in inside) > _MAX_ELEMENTS:
        return Cells(reason="it is too large for a proof of its neurons or heads")
    counts: dict[str, int] = {}
    try:
        replayed, inner, number = _proposed(traced, layer, branch)
        counts = _counts_read(replayed, branch)
        cut = cut_into(replayed.holder, branch, Cells(inner, number))
        if not cut.cut_tensors:
            return Cells(reason=cut.uncuttable_reason)
        choices: list[_Choice] = []
        if inner.heads is not None:
            cut_modules = {layer_cut.module for layer_cut in inner.cuts}  # their sizes are those of their weights
            of_others = {path: n for path, n in counts.items() if path.rpartition(".")[0] not in cut_modules}
            choices += [("scaled", path) for path, value in of_others.items() if _is_of_heads(value, cut)]
            choices += [("by_head", name) for name in _arguments_by_head(traced, layer, branch, number)]
        proven, reason = _search(replayed, cut, choices)
        if proven is not None:
            return Cells(proven, number, counts=tuple(counts.items()))
    except NoCells as problem:
        reason = str(problem)
    except Exception as error:  # of user code that runs alone
        reason = f"{type(error).__name__}: {first_line(error)}"
    return Cells(reason=reason, counts=tuple(counts.items()))


def _proposed(traced: Trace, layer: Layer, branch: LocatedBranch) -> tuple[ReplayedLayer, InnerLayers, int]:
    """The layers that may be cut, and the number of cells."""
    later = traced.nodes[layer.call.last :]
    names = {piece.parameter for piece in branch.pieces}
    for seed in range(_MAX_SEEDS):
        replayed = ReplayedLayer(layer, stored=names, later=later, drops=False, seed=seed)
        probe = replayed.copy()
        module = probe.holder.eval().get_submodule(LAYER)
        try:
            return replayed, *propose_cells(layer, module, branch.description, probe.forward)
        except UnevenBlocks:
            if seed == _MAX_SEEDS - 1:
                raise
    raise AssertionError


def _is_of_heads(value: int, branch: LocatedBranch) -> bool:
    """Whether a count may be the number of heads, or their width in some layer."""
    per_cell, rest = divmod(value, branch.num_cells)
    widths = {t.size * share // sum(t.shares) for t in branch.cut_tensors for share in (*t.shares, sum(t.shares))}
    return rest == 0 and per_cell > 0 and any(width % value == 0 for width in widths)


def cut_into(model: nn.Module, branch: LocatedBranch, cells: Cells) -> LocatedBranch:
    """A derived branch with its neurons or heads, or with the reason why it has none."""
    if cells.inner is None:
        return replace(branch, uncuttable_reason=cells.reason)
    try:
        return with_cells(model, branch, cells.inner, cells.number)
    except ValueError as problem:
        return replace(branch, uncuttable_reason=str(problem))


def _search(replayed: ReplayedLayer, branch: LocatedBranch, choices: list[_Choice]) -> tuple[InnerLayers | None, str]:
    """The branch's inner layers with the fewest counts and arguments with which they are proven; None and a reason if
    they are not.

    Args:
        branch: cut, without these.
    """
    inner = branch.description.inner
    assert inner is not None
    cases = [(_plan(regime, branch), subnetwork) for regime in ("forward", "backward") for subnetwork in (0, 1)]
    with_some = _expected(replayed, *cases[0], branch)
    if not difference({OUTPUT: with_some[OUTPUT]}, {OUTPUT: replayed.copy().output()}):
        return None, "without some of its neurons or heads it computes the same on the example, so nothing is proven"
    best, reason = 0, ""
    for chosen in itertools.islice(_subsets(choices), _MAX_TRIALS):
        number, failure = _num_equal(replayed, branch, _with(inner, chosen), cases, with_some)
        if not failure:
            for choice in chosen:
                fewer = tuple(other for other in chosen if other != choice)
                if not _num_equal(replayed, branch, _with(inner, fewer), cases, with_some)[1]:
                    chosen = fewer
            return _with(inner, chosen), ""
        if not reason or number > best:
            best, reason = number, failure
    return None, reason


def _with(inner: InnerLayers, chosen: tuple[_Choice, ...]) -> InnerLayers:
    scaled = tuple(name for field, name in chosen if field == "scaled")
    return replace(inner, scaled=scaled, by_head=tuple(name for field, name in chosen if field == "by_head"))


def _subsets(choices: list[_Choice]) -> Iterator[tuple[_Choice, ...]]:
    """All subsets; those with few elements and those without few of them first."""
    sizes = [size for pair in zip(range(len(choices) + 1), range(len(choices), -1, -1), strict=True) for size in pair]
    for size in dict.fromkeys(sizes):
        yield from itertools.combinations(choices, size)


def _num_equal(
    replayed: ReplayedLayer,
    branch: LocatedBranch,
    inner: InnerLayers,
    cases: Sequence[tuple[Plan, int]],
    of_first: dict[str, torch.Tensor],
) -> tuple[int, str]:
    """In how many cases the layer with some of the cells is what is expected, and how it fails then, if it does.

    Args:
        cases: plans with a subnetwork.
        of_first: what is expected in the first case, in which most trials fail. Large results of others are not kept.
    """
    cut = replace(branch, description=replace(branch.description, inner=inner))
    for number, (plan, subnetwork) in enumerate(cases):
        try:
            masked = _masked(replayed, plan, cut, subnetwork)
        except Exception as error:  # of user code, with sizes that it may not allow
            why = f"{type(error).__name__}: {first_line(error)}"
            return number, f"with fewer neurons or heads its forward fails ({plan.regime}; {why})"
        expected = _expected(replayed, plan, subnetwork, branch) if number else of_first
        found = difference(masked, expected, _TOLERANCE)
        if found and not difference({OUTPUT: masked[OUTPUT]}, {OUTPUT: expected[OUTPUT]}, _TOLERANCE):
            found = _difference_in_double_precision(replayed, plan, cut, branch, subnetwork, found)
        if found:
            return number, f"with some of its {branch.num_cells} neurons or heads, {found} ({plan.regime})"
    return len(cases), ""


def _difference_in_double_precision(
    replayed: ReplayedLayer, plan: Plan, cut: LocatedBranch, branch: LocatedBranch, subnetwork: int, in_single: str
) -> str:
    """Of equal outputs: in single precision a sum near zero may have the other sign, and a ReLU the other gradient.

    Args:
        in_single: the difference there, which counts if the layer is large or does not run in double precision.
    """
    exact = replayed.in_double_precision()
    if exact is None:
        return in_single
    try:
        masked, expected = _masked(exact, plan, cut, subnetwork), _expected(exact, plan, subnetwork, branch)
    except Exception:  # of user code that casts to single precision
        return in_single
    return difference(masked, expected, _TOLERANCE)


def _plan(regime: Regime, branch: LocatedBranch) -> Plan:
    """A plan of two subnetworks, each with every second group of cells."""
    count = min(branch.num_cells, _NUM_GROUPS)
    edges = [index * branch.num_cells // count for index in range(count + 1)]
    cells = [range(start, end) for start, end in itertools.pairwise(edges)]
    units = tuple(Unit(f"{branch.name}.{index}", branch.pieces_of_cells(group)) for index, group in enumerate(cells))
    return Plan(regime, "neuron", 2, 0, units, tuple((index % 2,) for index in range(count)), (0, 1))


def _masked(replayed: ReplayedLayer, plan: Plan, branch: LocatedBranch, subnetwork: int) -> dict[str, torch.Tensor]:
    """Output and gradients of the masked layer; gradients are zero for what it lacks."""
    masked = replayed.copy()
    mask = Mask(masked.holder, plan, subnetwork, [branch], is_scaled=True)
    mask.apply()
    results = masked.run()
    for name, pieces in mask.pieces.items():
        gradient = results.get(key := f"the gradient of {name}")
        if gradient is not None and mask.is_partial(name):
            dense = torch.zeros(mask.shapes[name])
            for piece, _ in pieces:
                if mask.is_trained(piece):
                    piece.narrow(dense).copy_(mask.view(piece, gradient))
            results[key] = dense
    return results


def _expected(replayed: ReplayedLayer, plan: Plan, subnetwork: int, branch: LocatedBranch) -> dict[str, torch.Tensor]:
    """Output and gradients of the layer with zeros in place of absent cells; of the whole layer in the backward
    regime. As in training, the output projection is multiplied by 1 / C in the forward regime."""
    dense = replayed.copy()
    parameters = dict(dense.holder.named_parameters())
    outputs = {tensor.parameter for tensor in branch.cut_tensors if tensor.cut.is_output}
    units = [*zip(plan.units, plan.holders, strict=True)]
    is_forward = plan.regime == "forward"
    for name in {tensor.parameter for tensor in branch.cut_tensors if tensor.kind == "parameter"}:
        parameters[name].data = parameters[name].data.clone()
    with torch.no_grad():
        for piece, holders in ((piece, holders) for unit, holders in units for piece in unit.pieces):
            if is_forward and piece.kind == "parameter":
                factor = 0.0 if subnetwork not in holders else 2.0 if piece.parameter in outputs else 1.0
                piece.narrow(parameters[piece.parameter]).mul_(factor)
    results = dense.run()
    for piece, holders in ((piece, holders) for unit, holders in units for piece in unit.pieces):
        gradient = results.get(f"the gradient of {piece.parameter}")
        if gradient is not None:
            factor = 0.0 if subnetwork not in holders else 2.0 if is_forward and piece.parameter in outputs else 1.0
            piece.narrow(gradient).mul_(factor)
    return results


def _arguments_by_head(traced: Trace, layer: Layer, branch: LocatedBranch, number: int) -> list[str]:
    """Keyword arguments of the body that may have a dim of heads."""
    calls = traced.calls.get(f"{layer.name}.{branch.description.bodies[0]}", [])
    call = next((call for call in calls if layer.call.first <= call.first), None)
    return [
        key
        for key, tensor, _ in (call.inputs if call is not None else ())
        if isinstance(key, str) and tensor.dim() > 3 and tensor.shape[1] % number == 0
    ]


def _counts_read(replayed: ReplayedLayer, branch: LocatedBranch) -> dict[str, int]:
    """Integers that a pass reads from the modules in a branch's bodies and around them, and from their configs, by
    attribute path in the root."""
    watched = replayed.copy()
    root = watched.holder.get_submodule(branch.root)
    read: set[tuple[int, str]] = set()
    paths: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        if not branch.description.root and not any(is_nested(name, body) for body in branch.description.bodies):
            continue
        objects = {"": module} | {key: value for key, value in vars(module).items() if _is_config(value)}
        for key, value in objects.items():
            if id(value) not in paths:
                _watch(value, read)
            paths.setdefault(id(value), []).append(f"{name}.{key}".strip("."))
    watched.forward()
    counts = {
        f"{path}.{name}".lstrip("."): vars_of[name]
        for key, name in sorted(read, key=lambda item: (paths[item[0]][0], item[1]))
        for path in paths[key]
        if (vars_of := vars(attribute(root, path) if path else root)).get(name) is not None
    }
    return {path: value for path, value in counts.items() if type(value) is int}


def _is_config(value: object) -> bool:
    is_data = hasattr(value, "__dict__") and not isinstance(value, nn.Module | torch.Tensor | type)
    return is_data and not callable(value)


def _watch(value: Any, read: set[tuple[int, str]]) -> None:
    """Record which integers of an object are read."""
    parent: Any = type(value)

    def get(self: Any, name: str) -> Any:
        result = parent.__getattribute__(self, name)
        if type(result) is int:
            read.add((id(self), name))
        return result

    try:
        value.__class__ = type(parent.__name__, (parent,), {"__getattribute__": get})
    except TypeError:
        return  # without a class that can be changed, it is not scaled
