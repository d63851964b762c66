"""Which descriptions of users were tried out at start, and for what: a re-plan must not need others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units, is_of_package
from sdp_deepspeed.masking.mask import members_of
from sdp_deepspeed.plan.plan import Plan


@dataclass(frozen=True)
class Tried:
    """
    Args:
        layers: whose descriptions are not the package's.
        ways: in which ranks lack something of them under the plan of the start: the layer, and what `_ways` says.
    """

    layers: frozenset[str]
    ways: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, model: nn.Module, branches: Sequence[LocatedBranch], plan: Plan) -> Tried:
        """
        Args:
            model: which nobody has cut yet.
        """
        layers = {branch.layer for branch in branches}
        own = frozenset(layer for layer in layers if not is_of_package(model.get_submodule(layer)))
        return cls(own, frozenset(_ways(branches, plan)))

    def untried(self, branches: Sequence[LocatedBranch], plan: Plan) -> list[str]:
        """What another plan needs that was not tried out, in words."""
        new = sorted({way for way in _ways(branches, plan) if way[0] in self.layers and way not in self.ways})
        return [f"{layer} {way}" for layer, way in new]


def _ways(branches: Sequence[LocatedBranch], plan: Plan) -> Iterator[tuple[str, str]]:
    """As a trial tells them apart: branches that are lacking together, or neurons or heads of one."""
    by_name = {branch.name: branch for branch in branches}
    for index, (unit, name) in enumerate(zip(plan.units, branches_of_units(plan.units, branches), strict=True)):
        if plan.coverage_of(index) == 1:
            continue
        members = members_of(unit, branches) if name is None else [by_name[name]]
        parts = " and ".join(branch.description.name for branch in members)
        yield members[0].layer, f"without {parts}" if name is None else f"with a part of {parts}"
