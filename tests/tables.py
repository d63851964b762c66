"""Costs of units, and what every table of an assignment must satisfy."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_deepspeed import assignment
from sdp_deepspeed.plan import spectral_gap
from sdp_deepspeed.units import UnitCost

ATTENTION = UnitCost(num_parameters=40, num_bytes=80, flops=90)
MLP = UnitCost(num_parameters=80, num_bytes=160, flops=160)


def equal_units(count: int) -> list[UnitCost]:
    return [UnitCost(10, 20, 30)] * count


def loads(holders: assignment.Holders, amounts: Sequence[int], k: int) -> list[int]:
    return [sum(a for a, h in zip(amounts, holders, strict=True) if s in h) for s in range(k)]


def gap(holders: assignment.Holders, costs: Sequence[UnitCost], k: int, p: int) -> float:
    return spectral_gap(holders, [cost.num_parameters for cost in costs], k, p)


def check_table(holders: assignment.Holders, num_units: int, k: int, p: int) -> None:
    assert len(holders) == num_units
    for subnetworks in holders:
        assert len(subnetworks) == p
        assert list(subnetworks) == sorted(set(subnetworks))
    assert {s for subnetworks in holders for s in subnetworks} == set(range(k))
    if num_units * (p - 1) >= k - 1:
        assert assignment.is_connected(assignment.incidence(holders, k))
