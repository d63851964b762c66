"""Costs of units, and what every table of an assignment must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment.graph import Holders, incidence, is_connected
from sdp_deepspeed.plan.spectral_gap import spectral_gap
from sdp_deepspeed.units import UnitCost
from tests.helpers.properties import is_thorough

Branches = list[str | None]

ATTENTION = UnitCost(num_parameters=40, num_bytes=80, flops=90)
MLP = UnitCost(num_parameters=80, num_bytes=160, flops=160)
HEAD, GROUP = UnitCost(4, 16, 8), UnitCost(3, 12, 6)  # of neuron units


def equal_units(count: int) -> list[UnitCost]:
    return [UnitCost(10, 20, 30)] * count


# Searches are what takes time, and a few subnetworks show as much.
MOST_SUBNETWORKS = 9 if is_thorough() else 6


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(num_units, k, p) with U p >= k."""
    k = draw(st.integers(1, MOST_SUBNETWORKS))
    p = draw(st.integers(1, k))
    return draw(st.integers(-(-k // p), 20)), k, p


@st.composite
def costs_of(draw: st.DrawFn, count: int, num_kinds: int) -> list[UnitCost]:
    """Of units of a few kinds."""
    kinds = draw(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=num_kinds))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    return [UnitCost(*kind) for kind in drawn]


def loads(holders: Holders, amounts: Sequence[int], k: int) -> list[int]:
    return [sum(a for a, h in zip(amounts, holders, strict=True) if s in h) for s in range(k)]


def gap(holders: Holders, costs: Sequence[UnitCost], k: int) -> float:
    return spectral_gap(holders, [cost.num_parameters for cost in costs], k)


def check_table(holders: Holders, num_units: int, k: int, p: int) -> None:
    assert len(holders) == num_units
    for subnetworks in holders:
        assert len(subnetworks) == p
        assert list(subnetworks) == sorted(set(subnetworks))
    assert {s for subnetworks in holders for s in subnetworks} == set(range(k))
    if num_units * (p - 1) >= k - 1:
        assert is_connected(incidence(holders, k))


def model(num_layers: int, num_heads: int, num_groups: int) -> tuple[list[UnitCost], Branches]:
    """Costs and branches of a decoder's units."""
    names = [f"layers.{layer}.{part}" for layer in range(num_layers) for part in ("attention", "mlp")]
    counts, costs = (num_heads, num_groups) * num_layers, (HEAD, GROUP) * num_layers
    branches: Branches = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    return [cost for cost, count in zip(costs, counts, strict=True) for _ in range(count)], branches


def widths(holders: Holders, branches: Branches, k: int) -> dict[str, list[int]]:
    """Units of each branch that each subnetwork holds."""
    found = {name: [0] * k for name in branches if name is not None}
    for name, subnetworks in zip(branches, holders, strict=True):
        for subnetwork in subnetworks if name is not None else ():
            found[str(name)][subnetwork] += 1
    return found


def checked(balanced: Callable[[], Holders], branches: Branches, k: int, p: int) -> Holders:
    """A table with a unit of each branch for every subnetwork, the same when it is made again."""
    holders = balanced()
    check_table(holders, len(branches), k, p)
    assert all(min(found) >= 1 for found in widths(holders, branches, k).values())
    assert holders == balanced()
    return holders


def check_even(holders: Holders, branches: Branches, k: int, p: int) -> None:
    sizes = Counter(branches)
    for name, found in widths(holders, branches, k).items():
        assert set(found) <= {sizes[name] * p // k, -(-sizes[name] * p // k)}, name
