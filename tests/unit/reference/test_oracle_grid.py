"""The sample of the oracle has every pair of settings that can be combined."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.helpers.oracle_grid import AXES, Case, cases, grid, pairs_of, possible, sample


def test_every_pair_of_settings_is_in_the_sample() -> None:
    """Where something is absent, but for pairs with C = 1; and but for pairs that no case can have."""
    found = set().union(*map(pairs_of, sample()))
    axes = AXES | {"holders": ("one", "some", "all")}
    for names in itertools.combinations(axes, 2):
        for values in itertools.product(*(axes[name] for name in names)):
            pair = tuple(zip(names, values, strict=True))
            if pair not in found:
                assert not [case for case in changed(dict(pair)) if possible(case) and pair in pairs_of(case)], pair


def changed(values: dict[str, Any]) -> Iterator[Case]:
    """Cases of the grid, with these values in place of theirs."""
    for case in grid():
        other = replace(case, **{name: value for name, value in values.items() if name != "holders"})
        holders = {"one": 1, "some": 2, "all": other.num_subnetworks}.get(values.get("holders", ""), case.holders)
        yield replace(other, holders=holders)


def test_the_sample_is_small_and_its_names_tell_cases_apart() -> None:
    """Its size decides how long the gate takes."""
    assert len(sample()) <= 60
    assert all(map(possible, grid()))
    assert len({(case.ranks, str(case)) for case in cases(full=True)}) == len(cases(full=True))
