"""`assignment: "auto"`: bytes between nodes against the spectral gap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sdp_deepspeed.plan.assignment.nodes import on_few_nodes
from sdp_deepspeed.plan.placement import Weighed
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import UnitCost


def weigh(
    balanced: Plan,
    costs: Sequence[UnitCost],
    branches: Sequence[str | None],
    nodes: tuple[int, ...],
    place: Callable[[Plan], Plan],
) -> Plan:
    """The plan with holders on few nodes if it sends less than `balanced` (for three quarters of the spectral gap, or
    more); else `balanced`, and on one node just that.

    Args:
        balanced: a plan by `methods.balanced`, placed.
        costs: of its units.
        branches: as for `planner.make_plan`.
        nodes: by `placement.nodes_of_subnetworks`.
        place: places a plan as `balanced` was.
    """
    assert balanced.placement is not None
    if balanced.placement.num_nodes == 1:
        return balanced
    holders = on_few_nodes(costs, balanced.holders, nodes, seed=balanced.seed, branches=branches)
    if holders is not None:
        other = place(dataclasses.replace(balanced, holders=holders, node_of_subnetwork=nodes))
        assert other.placement is not None
        if other.placement.sent_bytes < balanced.placement.sent_bytes:
            gap = balanced.spectral_gap([cost.num_parameters for cost in costs])
            return dataclasses.replace(other, weighed=Weighed(gap, balanced.placement.sent_bytes))
    return dataclasses.replace(balanced, weighed=Weighed())
