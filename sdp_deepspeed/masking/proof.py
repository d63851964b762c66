"""Proof by numbers that derived branches may be absent.

The oracle needs no names: a layer in which a branch is absent computes the same as the layer in which all parameters of
that branch are zero, and so do its gradients; and what a branch adds is multiplied as the mask multiplies the branch.
Each form of a layer, and of its calls, runs once by itself in training mode, in fp32 on the CPU, with random weights
and the inputs that it had in the traced pass; inputs that depend on weights are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sdp_deepspeed.architectures import LocatedBranch, locate_branches
from sdp_deepspeed.architectures.branch import is_inside
from sdp_deepspeed.architectures.derivation import Derivation, derivation_of, known_random_numbers, last_derivation
from sdp_deepspeed.architectures.streams import Layer, layer_of
from sdp_deepspeed.architectures.trace import Node, Trace
from sdp_deepspeed.masking.absent_blocks import skip_branch
from sdp_deepspeed.masking.cell_proof import Cells, cells_of, cut_into
from sdp_deepspeed.masking.replayed_layer import LAYER, ReplayedLayer, difference, first_line
from sdp_deepspeed.masking.scale import scale_block

_FACTOR = 3.0
_CELLS: WeakKeyDictionary[Derivation, dict[str, Cells]] = WeakKeyDictionary()  # by name of a branch
_FAILURES: WeakKeyDictionary[Derivation, dict[str, str]] = WeakKeyDictionary()  # reasons, by name of a branch


def proven_branches(model: nn.Module, strategy: str | Mapping[str, str] = "block") -> list[LocatedBranch]:
    """The residual branches of a model that masking may leave out, with the neurons or heads that a strategy cuts.

    Described branches are taken as they are (`check_description`); derived ones are proven here, once for a model.

    Args:
        model: whole, on any device, including meta.
        strategy: see `units_of_branches`.

    Raises:
        ValueError: see `locate_branches`; or no derived branch could be proven.
    """
    branches = locate_branches(model)
    if not any(branch.is_derived for branch in branches):
        return branches
    derivation = derivation_of(model)
    if derivation not in _FAILURES:
        with known_random_numbers(), _disable_current_modes(), torch.device("cpu"):
            _FAILURES[derivation] = _failures(derivation, branches)
    failures = _FAILURES[derivation]
    proven = [branch for branch in branches if branch.name not in failures]
    if not proven:
        name, reason = next(iter(failures.items()))
        raise ValueError(f"{type(model).__name__}: no residual branch can be left out: {name!r}: {reason}")
    return with_proven_cells(model, proven, strategy)


def with_proven_cells(
    model: nn.Module, branches: Sequence[LocatedBranch], strategy: str | Mapping[str, str]
) -> list[LocatedBranch]:
    """Branches with the neurons or heads of those derived ones that a strategy cuts, which are proven here, once for a
    model; or with the reason why they have none.

    Args:
        model: whole, on any device, including meta.
        strategy: see `units_of_branches`.
    """

    def is_cut(branch: LocatedBranch) -> bool:
        chosen = strategy if isinstance(strategy, str) else strategy.get(branch.description.name)
        return branch.is_derived and not branch.cut_tensors and chosen == "neuron"

    if not any(is_cut(branch) for branch in branches):
        return [*branches]
    derivation = last_derivation(model)
    known = _CELLS.setdefault(derivation, {})
    of_forms: dict[Any, list[Cells]] = {}
    for branch in filter(is_cut, branches):
        if branch.name in known:
            continue
        with known_random_numbers(), _disable_current_modes(), torch.device("cpu"), torch.enable_grad():
            traced, layer = _replayable(derivation, branch.layer)[0]
            of_form = of_forms.setdefault(_form(traced, layer, [branch]), [])
            root = layer.module.get_submodule(branch.description.root)
            cells = next((cells for cells in of_form if cells.applies_to(root)), None)
            if cells is None:
                cells = cells_of(traced, layer, _in_replayed(derivation, branch))
                of_form.append(cells)
            known[branch.name] = cells
    return [cut_into(model, branch, known[branch.name]) if is_cut(branch) else branch for branch in branches]


def _replayable(derivation: Derivation, name: str) -> list[tuple[Trace, Layer]]:
    """Each call of a layer."""
    traced, prefix, _ = derivation.replays[name]
    relative = name.removeprefix(prefix)
    layers = [layer_of(traced.model, traced, relative, call) for call in traced.calls[relative]]
    return [(traced, layer) for layer in layers if layer is not None]


def replicated_layers(model: nn.Module) -> list[str]:
    """A warning about layers that all ranks hold, in whole or in part, because a branch was not derived or proven; none
    without such layers.

    Args:
        model: whose branches are known from `proven_branches`.
    """
    derivation = last_derivation(model)
    failures = _FAILURES.get(derivation)  # None if all branches are described
    reasons = {} if failures is None else {**derivation.reasons, **failures}
    if not reasons:
        return []
    name, reason = next(iter(reasons.items()))
    return [f"branches of {len(reasons)} layers or types are replicated, such as {name!r}: {reason}"]


def _failures(derivation: Derivation, branches: Sequence[LocatedBranch]) -> dict[str, str]:
    """Reasons why branches are not proven, by name."""
    of_forms: dict[Any, dict[str, str]] = {}
    failures: dict[str, str] = {}
    for name in dict.fromkeys(branch.layer for branch in branches):
        of_layer = [branch for branch in branches if branch.layer == name and branch.is_bypassed]
        for traced, layer in _replayable(derivation, name):
            form = _form(traced, layer, of_layer)
            if form not in of_forms:
                own = [_in_replayed(derivation, branch) for branch in of_layer]
                of_forms[form] = _failures_of_layer(layer, own)
            failures |= {f"{name}.{kind}": reason for kind, reason in of_forms[form].items()}
    return failures


def _form(traced: Trace, layer: Layer, branches: Sequence[LocatedBranch]) -> Any:
    """What two calls of layers have in common if they compute the same of other weights: the operations with their
    constants, and where their inputs come from."""
    prefix, start = len(layer.name), layer.call.first

    def described(node: Node) -> Any:
        before = [max(-1, of.order - start) for of in node.inputs if of.operation != "input"]
        parameters = sorted(parameter[prefix:] for parameter in node.parameters)
        return (node.operation, node.module[prefix:], node.shape, *map(repr, node.constants), *before, *parameters)

    operations = tuple(described(node) for node in traced.nodes[start : layer.call.last])
    modules = tuple((name, type(module)) for name, module in layer.module.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.module.named_parameters())
    return operations, modules, shapes, tuple(branch.description for branch in branches)


def _failures_of_layer(layer: Layer, branches: Sequence[LocatedBranch]) -> dict[str, str]:
    """Why branches of a layer are not proven, by type; each is left out by itself, then all others together.

    Args:
        branches: with the names of `ReplayedLayer`.
    """
    try:
        replayed = ReplayedLayer(layer)
        dense = replayed.copy().run()
    except Exception as error:  # of user code that runs alone
        reason = f"the layer could not be run alone, so nothing is proven ({type(error).__name__}: {first_line(error)})"
        return {branch.description.name: reason for branch in branches}
    failures: dict[str, str] = {}
    for branch in branches:
        if reason := _failure(replayed, dense, [branch]):
            failures[branch.description.name] = reason
    left = [branch for branch in branches if branch.description.name not in failures]
    if len(left) > 1 and (reason := _failure(replayed, dense, left)):
        failures |= {branch.description.name: reason for branch in left}
    return failures


def _failure(replayed: ReplayedLayer, dense: dict[str, torch.Tensor], absent: Sequence[LocatedBranch]) -> str:
    """Why a layer without branches is not proven; empty if it is."""
    names = ", ".join(branch.description.name for branch in absent)
    try:
        expected = _zeroed(replayed, absent).run()
        if not all(bool(tensor.isfinite().all()) for tensor in expected.values()):
            return f"with zero parameters in {names} it does not compute finite numbers"
        masked = _without(replayed, absent).run()
        is_scaled = len(absent) > 1 or _is_scaled(replayed, absent[0])
    except Exception as error:  # of user code, on zeros
        return (
            f"without {names} it could not be run, so nothing is proven ({type(error).__name__}: {first_line(error)})"
        )
    if found := difference(masked, expected):
        return f"without {names} it differs from the layer with zero parameters there: {found}"
    if not difference(masked, dense):
        return f"without {names} it computes the same on the example, so nothing is proven"
    return "" if is_scaled else f"what {names} adds is not multiplied if the output of its last module is"


def _is_scaled(replayed: ReplayedLayer, branch: LocatedBranch) -> bool:
    """Whether what a branch adds is multiplied by a factor if the mask multiplies the branch by that."""
    scaled = replayed.copy()
    scale_block(scaled.holder, branch, 1 / _FACTOR)
    without, with_it, multiplied = (
        _after_addition(layer, branch) for layer in (_zeroed(replayed, [branch]), replayed.copy(), scaled)
    )
    if without is None or with_it is None or multiplied is None:
        return False
    return not difference({LAYER: multiplied}, {LAYER: without + _FACTOR * (with_it - without)})


def _after_addition(replayed: ReplayedLayer, branch: LocatedBranch) -> torch.Tensor | None:
    """The stream after a branch was added to it; None if that is not once."""
    traced = Trace(replayed.holder, keeps_values=True)
    replayed.forward(traced)
    layer = layer_of(replayed.holder, traced, LAYER, traced.calls[LAYER][0])
    body = branch.bodies[0]
    paths = [] if layer is None else layer.paths
    values = [path.addition.value for path in paths if any(is_inside(node.module, body) for node in path.nodes)]
    return values[0] if len(values) == 1 else None


def _in_replayed(derivation: Derivation, branch: LocatedBranch) -> LocatedBranch:
    """A branch by the names of a `ReplayedLayer`, as described there."""
    *_, described = derivation.replays[branch.layer]
    names = [f"{LAYER}.{piece.parameter.removeprefix(branch.layer + '.')}" for piece in branch.pieces]
    pieces = [replace(piece, parameter=name) for piece, name in zip(branch.pieces, names, strict=True)]
    description = next(of_narrow for of_narrow in described if of_narrow.name == branch.description.name)
    return replace(branch, layer=LAYER, pieces=tuple(pieces), description=description)


def _without(replayed: ReplayedLayer, branches: Sequence[LocatedBranch]) -> ReplayedLayer:
    """A copy of the layer without branches, as the mask makes it."""
    masked = replayed.copy()
    for branch in branches:
        list(skip_branch(masked.holder, branch))
        inside = {piece.parameter for piece in branch.pieces}
        own = set(branch.parameters)
        for name, parameter in masked.holder.named_parameters():
            if name in inside:
                parameter.data = torch.zeros(parameter.shape if name in own else 0)
                parameter.requires_grad_(False)
    return masked


def _zeroed(replayed: ReplayedLayer, branches: Sequence[LocatedBranch]) -> ReplayedLayer:
    """A copy of the layer in which all parameters of branches are zero."""
    zeroed = replayed.copy()
    inside = {piece.parameter for branch in branches for piece in branch.pieces}
    for name, parameter in zeroed.holder.named_parameters():
        if name in inside:
            size = parameter.untyped_storage().nbytes() // parameter.element_size()  # elements may overlap
            parameter.data = parameter.new_zeros(size).as_strided(parameter.shape, parameter.stride())
            parameter.requires_grad_(False)
    return zeroed
