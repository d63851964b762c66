"""Is what a user said of a layer true? A layer of each class is tried out before the model is cut.

Nothing of the model is called but, where a layer takes more than one tensor, its forward up to that layer. What is
compared is the masking itself on a copy of the layer, with random weights and inputs:

- blocks: the layer without a branch is the layer in which all modules of the branch give zeros;
- neurons: a body that runs once with some cells and once with the others is the body with all of them.

The package's own descriptions are pinned to the code of the layer, and compared with zeroed pieces by its tests. They
are tried out where a layer has another module inside than those of its family's file: somebody put it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import (
    LocatedBranch,
    locate_branches,
    units_of_branches,
)
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.block import BlockPart
from sdp_deepspeed.masking.neuron import NeuronPart
from sdp_deepspeed.masking.own_forward import bound_forward, runs_by_another_forward
from sdp_deepspeed.masking.trial import Alone, Trial, forked_random_numbers, trial_of
from sdp_deepspeed.masking.tried import Attempt, attempts_of, own_layers
from sdp_deepspeed.masking.watched import read_numbers
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors
from sdp_deepspeed.units import Unit

# Wrong descriptions differ by a tenth and more. In fp32 what remains of two sums instead of one is below 1e-5, with
# TF32 below 1e-3; a layer that takes its own half precision only has 8 bits, rounded some dozen times.
_TOLERANCES = {torch.float32: 2.0**-7}
_HALF = 2.0**-4


def check_descriptions(
    model: nn.Module, branches: Sequence[LocatedBranch], plan: Plan, device: torch.device
) -> list[str]:
    """Try out the descriptions that are not the package's, once for each class of layers. No collective: all ranks
    draw the same numbers.

    Args:
        model: whole, on `device` or without storage.
        branches: its residual branches.
        plan: whose units are blocks or neurons of them.
        device: where to try them out.

    Returns:
        What could not be tried out, for a warning.

    Raises:
        ValueError: a description is not true of its layer, by class and branch, with what differs.
    """
    if plan.is_whole:
        return []
    notes = []
    for layer, attempts in _attempts(model, branches, plan).items():
        label = f"{layer!r} ({type(model.get_submodule(layer)).__name__})"
        if wrapped := _with_own_forward(model, layer):
            notes.append(_NOTE.format(layer=label, why=f"a copy of {wrapped} would run the forward of the original"))
            continue
        with forked_random_numbers(device):
            try:
                trial = trial_of(model, layer, next(b for b in branches if b.layer == layer), device)
                again = trial.difference(trial.run(), trial.run())
            except Exception as problem:  # of the user's code, which takes other inputs than a few tokens
                notes.append(_NOTE.format(layer=label, why=f"{type(problem).__name__}: {problem}"))
                continue
            if not again <= _tolerance(trial):
                notes.append(_NOTE.format(layer=label, why="it computes something else each time"))
                continue
            try:
                _check(label, trial, attempts)
            except torch.OutOfMemoryError as problem:
                notes.append(_NOTE.format(layer=label, why=f"{type(problem).__name__}: {problem}"))
    return notes


def _with_own_forward(model: nn.Module, layer: str) -> str:
    """The first module of a layer of which a copy would not run as it does; empty if all do."""
    modules = model.get_submodule(layer).named_modules(prefix=layer)
    return next((repr(name) for name, module in modules if runs_by_another_forward(module)), "")


def _check(label: str, trial: Trial, attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        if attempt.strategy == "block":
            _check_block(label, trial, attempt.parts)
        else:
            _check_cells(label, trial, attempt.parts[0])


_NOTE = (
    "the description of {layer} could not be tried out ({why}): test it, as sdp_deepspeed/architectures/README.md says"
)


def _attempts(model: nn.Module, branches: Sequence[LocatedBranch], plan: Plan) -> dict[str, list[Attempt]]:
    """What to try out on which layer: each on the first of its classes (its own, and those of the
    modules inside) that the plan does it with."""
    result: dict[str, list[Attempt]] = {}
    seen: set[tuple[Any, Attempt]] = set()
    tried = own_layers(model, branches)
    for layer, attempt in attempts_of(branches, plan):
        kinds = tuple((type(module), bound_forward(module)) for module in model.get_submodule(layer).modules())
        if layer in tried and (kinds, attempt) not in seen:
            seen.add((kinds, attempt))
            result.setdefault(layer, []).append(attempt)
    return result


def _tolerance(trial: Trial) -> float:
    return _TOLERANCES.get(trial.stream.dtype, _HALF)


def _check_block(label: str, trial: Trial, parts: Sequence[str]) -> None:
    """The layer without some branches, against the layer in which they end in zeros."""
    words = f"{label}: described without {' and '.join(map(repr, parts))}, the layer"
    try:
        expected = trial.run(partial(_silence, parts))
        difference = trial.difference(trial.run(partial(_lack, parts)), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise ValueError(f"{words} does not run: {problem}") from problem
    if not difference <= _tolerance(trial):
        raise ValueError(
            f"{words} is not what it is when they add zeros (a difference of {difference:.0%}): a module that the "
            "description names for them also acts elsewhere in the layer. Is a `norm`, or a module of `after`, the "
            "one of another branch?"
        )


def _silence(parts: Sequence[str], alone: Alone) -> None:
    """Have all modules of branches give zeros."""
    for branch in locate_branches(alone):
        if branch.description.name in parts:
            for name in branch.modules:
                alone.get_submodule(name).register_forward_hook(_zeros)


def _zeros(_: Any, args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def _check_cells(label: str, trial: Trial, part: str) -> None:
    """A body in two halves, against the whole body."""
    branch = next(branch for branch in locate_branches(trial.alone) if branch.description.name == part)
    if branch.num_cells < 2:
        return
    words = f"{label}: with the neuron strategy its branch {part!r}"
    try:
        expected = trial.run()
        difference = trial.difference(trial.run(partial(_halve, part)), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise ValueError(
            f"{words} does not run with a part of its cells: {_advice(trial, branch, problem)}"
        ) from problem
    if not difference <= _tolerance(trial):
        raise ValueError(
            f"{words} computes something else (a difference of {difference:.0%} between all {branch.num_cells} "
            "neurons or heads, and some of them and the others added up): its `inner` is not as the body is. Is a "
            "fused projection described without `blocks`, a layer missing in `cuts`, or a `dim` the other one? "
            f'Correct it, or use "block" for the part {part!r}'
        )


class _PlanOfTrial(Plan):
    """Its first subnetwork may lack all units that there are."""

    def __post_init__(self) -> None: ...


def _lack(parts: Sequence[str], alone: Alone) -> None:
    """As a rank whose subnetwork lacks some branches."""
    branches = [branch for branch in locate_branches(alone) if branch.description.name in parts]
    units = units_of_branches(branches, strategy="block", granularity="layer", num_subnetworks=3)
    BlockPart(alone, _of_rank(alone, "forward", "block", units), 0, branches, copies=True).apply()


def _halve(part: str, alone: Alone) -> None:
    """As a rank whose subnetwork lacks every other group of cells. What a regime refuses is not asked: a description
    is right or wrong in both."""
    branch = next(branch for branch in locate_branches(alone) if branch.description.name == part)
    units = units_of_branches([branch], strategy="neuron", num_subnetworks=3)
    for module in alone.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # others ask for rows of certain lengths
    NeuronPart(alone, _of_rank(alone, "backward", "neuron", units), branch, range(len(units))).apply()


def _of_rank(alone: Alone, regime: str, strategy: str, units: Sequence[Unit]) -> RankModel:
    """One that lacks every other unit, if only the first."""
    holders = tuple((1 - index % 2,) for index in range(len(units)))
    plan = _PlanOfTrial(regime, strategy, 2, 1, 0, tuple(units), holders, (0, 1))
    return RankModel(plan, tuple(dense_tensors(alone)), PieceViews(named_tensors(alone)), rank=0)


def _advice(trial: Trial, branch: LocatedBranch, problem: Exception) -> str:
    """What a body whose sizes are its own must use."""
    assert branch.description.inner is not None
    numbers = read_numbers(trial, branch)
    unscaled = {name: value for name, value in numbers.items() if name not in branch.description.inner.scaled}
    said = ", ".join(f"{name} = {value}" for name, value in unscaled.items()) or "none"
    return (
        f"{problem}. Numbers that its forward reads from attributes, and that the description does not scale: {said}. "
        "Those that count heads or neurons, or the width of all of them, must be named in `scaled` of its InnerLayers; "
        "then they count those that a worker has. No size may come from the residual stream's width: keep the width of "
        "a head in an attribute of its own (`self.head_dim`), and write `view(B, T, -1, self.head_dim)`, at the end "
        f'`view(B, T, -1)`. Or use "block" for the part {branch.description.name!r}'
    )
