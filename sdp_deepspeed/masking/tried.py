"""For what a plan takes a description: what is tried out at start, and what a re-plan must not need more of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units, is_of_package
from sdp_deepspeed.masking.mask import members_of
from sdp_deepspeed.plan.plan import Plan


class Attempt(NamedTuple):
    """What a plan does with a layer: it lacks some branches together, or some neurons or heads of one."""

    strategy: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        parts = " and ".join(self.parts)
        return f"without {parts}" if self.strategy == "block" else f"with a part of {parts}"


@dataclass(frozen=True)
class Tried:
    """
    Args:
        layers: whose descriptions are not the package's.
        attempts: what the plans of the start do with layers, by name.
    """

    layers: frozenset[str]
    attempts: frozenset[tuple[str, Attempt]]

    @classmethod
    def of(cls, model: nn.Module, branches: Sequence[LocatedBranch], plans: Sequence[Plan]) -> Tried:
        """
        Args:
            model: which nobody has cut yet.
        """
        attempts = frozenset(attempt for plan in plans for attempt in attempts_of(branches, plan))
        return cls(own_layers(model, branches), attempts)

    def untried(self, branches: Sequence[LocatedBranch], plan: Plan) -> list[str]:
        """What another plan needs that was not tried out, in words."""
        new = {attempt for attempt in attempts_of(branches, plan) if attempt[0] in self.layers} - self.attempts
        return [f"{layer} {attempt}" for layer, attempt in sorted(new)]


def own_layers(model: nn.Module, branches: Sequence[LocatedBranch]) -> frozenset[str]:
    """Names of layers whose descriptions are not the package's, or not true of all that is in them."""
    layers = {branch.layer for branch in branches}
    return frozenset(layer for layer in layers if not is_of_package(model.get_submodule(layer)))


def attempts_of(branches: Sequence[LocatedBranch], plan: Plan) -> Iterator[tuple[str, Attempt]]:
    """Layers of which ranks lack something, and what; one for each unit that not every subnetwork holds."""
    by_name = {branch.name: branch for branch in branches}
    for index, (unit, name) in enumerate(zip(plan.units, branches_of_units(plan.units, branches), strict=True)):
        if plan.coverage_of(index) == 1:
            continue
        members = members_of(unit, branches) if name is None else [by_name[name]]
        parts = tuple(branch.description.name for branch in members)
        yield members[0].layer, Attempt("block" if name is None else "neuron", parts)
