"""`branch_scale: "training"`: subnetworks multiply what their units add to the residual stream by 1 / C.

As with dropout and stochastic depth, the sum of the branches that are present then has the size of the dense model's,
which is not scaled. A block is multiplied at its end; neurons, heads and channels after the output projection, without
its bias, which every rank adds. Only the forward regime has scales, and only while the mask is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward, run_with
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import blocks_of_units, branches_of_units


@dataclass(frozen=True)
class Scale:
    """State of the forward of a module whose output is multiplied.

    Args:
        bias: name of a parameter that is added without a factor; empty if there is none.
        added_to: position or keyword of the argument to which the module adds its output itself.
    """

    factor: float
    bias: str = ""
    added_to: int | str | None = None


def coverage_of_branches(plan: Plan, branches: Sequence[LocatedBranch]) -> dict[str, float]:
    """Coverage of each branch that some subnetworks lack, whole or in part, by its name.

    Raises:
        ValueError: groups of neurons or heads of one branch have different coverage.
    """
    values: dict[str, set[float]] = {branch.name: set() for branch in branches}
    for index, members in blocks_of_units(plan, branches).items():
        for branch in members:
            values[branch.name].add(plan.coverage_of(index))
    for index, name in enumerate(branches_of_units(plan.units, branches)):
        if name is not None:
            values[name].add(plan.coverage_of(index))
    in_units = Counter[str]()
    for unit in plan.units:
        for piece in unit.pieces:
            in_units[piece.parameter] += piece.length
    for branch in branches:
        coverages = values[branch.name]
        if any(0 < in_units[tensor.parameter] < tensor.size for tensor in branch.cut_tensors if tensor.cut.is_output):
            coverages.add(1.0)  # other groups are held by all ranks
        if len(coverages) > 1:
            raise ValueError(
                f'{KEY}.branch_scale: got "training", but groups of {branch.name!r} have coverage {sorted(coverages)}; '
                'give them the same coverage, or use "none"'
            )
    return {name: coverages.pop() for name, coverages in values.items() if coverages and coverages != {1.0}}


def starts_smaller(model: nn.Module, branch: LocatedBranch) -> bool:
    """Whether `Init` makes the output projection of a scaled branch smaller: one is known, and no norm follows."""
    description = branch.description
    after = [f"{branch.layer}.{name}" for name in description.after]
    after += [f"{branch.root}.{name}" for name in description.inner.tail] if description.inner else []
    has_norm = any("norm" in type(model.get_submodule(name)).__name__.lower() for name in after)
    return bool(branch.outputs) and not has_norm


def describe_scale(
    model: nn.Module, branches: Sequence[LocatedBranch], scaled: Mapping[str, float], *, by_init: bool
) -> str:
    """What a user should know at start-up, one line; with a hint if the first or the last layer is not whole.

    Args:
        branches, scaled: of the mask.
        by_init: whether the model was built under `Init`.
    """
    factors = sorted({f"{1 / coverage:.3g}" for coverage in scaled.values()}, key=float)
    smaller = sum(branch.name in scaled and starts_smaller(model, branch) for branch in branches)
    start = f"output projections of {smaller} start multiplied by C" if by_init else "weights start as given"
    ends = {branches[0].layer, branches[-1].layer}
    hint = ""
    if any(branch.name in scaled for branch in branches if branch.layer in ends):
        hint = "; some ranks lack parts of the first or last layer, which lowered quality much: see coverage.whole_ends"
    text = f"subnetworks multiply {len(scaled)} branches by 1 / C ({', '.join(factors)}); {start}{hint}"
    return f"{KEY}.branch_scale: {text}"


def scale_block(model: nn.Module, branch: LocatedBranch, coverage: float) -> nn.Module:
    """Multiply what a whole branch adds by 1 / `coverage`; returns the changed module."""
    module = model.get_submodule(branch.modules[-1])
    is_body = branch.description.modules[-1] == branch.description.bodies[0]
    replace_forward(module, _scaled, Scale(1 / coverage, added_to=branch.description.added_to if is_body else None))
    return module


def scale_outputs(
    model: nn.Module, branch: LocatedBranch, coverage: float, biases: Mapping[str, tuple[str, bool]]
) -> Iterator[nn.Module]:
    """Multiply the output projections of a cut branch by 1 / `coverage`; yields the changed modules.

    Args:
        biases: of `Mask.output_biases`.
    """
    outputs = [tensor.parameter.rpartition(".")[0] for tensor in branch.cut_tensors if tensor.cut.is_output]
    for owner in dict.fromkeys(outputs):
        module = model.get_submodule(owner)
        bias, _ = biases[owner]
        has_bias = getattr(module, bias, None) is not None
        replace_forward(module, _scaled, Scale(1 / coverage, bias=bias if has_bias else ""))
        yield module


def _scaled(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    state: Scale = forward.state
    if (place := state.added_to) is not None:
        stream = kwargs[place] if isinstance(place, str) else args[place]
        zeros = torch.zeros_like(stream)
        args = tuple(zeros if index == place else value for index, value in enumerate(args))
        kwargs |= {place: zeros} if isinstance(place, str) else {}
        return _first(forward.previous(*args, **kwargs), lambda output: stream + output * state.factor)
    if state.bias:
        divided = {state.bias: getattr(forward.module, state.bias) / state.factor}
        return run_with(forward, divided, *args, **kwargs) * state.factor
    return _first(forward.previous(*args, **kwargs), lambda output: output * state.factor)


def _first(outputs: Any, change: Any) -> Any:
    """Change the first of several outputs, or the only one."""
    return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)
