"""Counts of a plan from the config block and the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.plan.counts import PlanCounts, resolve
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit


def read(**settings: Any) -> SubnetworkConfig:
    config = parse({KEY: {"coverage": 0.5, **settings}})
    assert config is not None
    return config


def save_plan(path: Path, k: int = 4, p: int = 2) -> str:
    units = tuple(Unit(f"u{i}", (Piece(f"w{i}", None, 0, 4),)) for i in range(k))
    holders = tuple(tuple(sorted((i + j) % k for j in range(p))) for i in range(k))
    Plan("forward", "block", k, p, 0, units, holders, tuple(range(k))).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("coverage", "size", "holders"),
    [(0.5, 4, 2), (1, 4, 4), (1.0, 1, 1), (0.3333, 3, 1), (0.333333, 3, 1), (0.667, 3, None), (0.25, 8, 2)],
)
def test_coverage_to_holders(coverage: float, size: int, holders: int | None) -> None:
    if holders is None:
        with pytest.raises(ValueError, match=r"nearest that are: 0\.3333 \(holders 1\), 0\.6667 \(holders 2\), 1 "):
            resolve(read(coverage=coverage), size)
    else:
        assert resolve(read(coverage=coverage), size) == PlanCounts(size, holders, 1)


@pytest.mark.parametrize("size", range(1, 20))
def test_coverages_that_a_message_lists_are_accepted(size: int) -> None:
    for holders in range(1, size + 1):
        printed = float(f"{round(holders / size, 4):g}")
        assert resolve(read(coverage=printed), size).num_holders == holders


def test_coverage_without_whole_holders() -> None:
    expected = r"coverage: 0\.3 of 4 subnetworks is 1\.2 holders per unit, .*: 0\.25 \(holders 1\), 0\.5 \(holders 2\)"
    with pytest.raises(ValueError, match=expected):
        resolve(read(coverage=0.3), 4)
    with pytest.raises(ValueError, match=r"0\.04 of 4 subnetworks"):
        resolve(read(coverage=0.04), 4)


def test_holders_and_subnetworks() -> None:
    config = parse({KEY: {"holders": 3, "subnetworks": 4}})
    assert config is not None
    assert resolve(config, 4) == PlanCounts(4, 3, 1)
    with pytest.raises(ValueError, match=r"holders: got 3, but there are only 2 subnetworks; choose 1 to 2"):
        resolve(config.model_copy(update={"subnetworks": "auto"}), 2)
    with pytest.raises(ValueError, match=r"subnetworks: got 4 subnetworks, which do not divide the 6 .*: 1, 2, 3, 6"):
        resolve(config, 6)
    with pytest.raises(ValueError, match="do not divide the 2 data-parallel ranks"):
        resolve(config, 2)
    assert resolve(config, 8) == PlanCounts(4, 3, 2)
    assert resolve(read(coverage=1.0, subnetworks=1), 3) == PlanCounts(1, 1, 3)
    assert resolve(read(coverage=0.5, subnetworks=2), 6) == PlanCounts(2, 1, 3)
    with pytest.raises(ValueError, match=r"0\.5 of 1 subnetworks is 0\.5 holders per unit, not a whole number"):
        resolve(read(coverage=0.5, subnetworks=1), 4)


def test_counts_from_a_plan(tmp_path: Path) -> None:
    path = save_plan(tmp_path / "plan.json")
    config = parse({KEY: {"assignment": path}})
    assert config is not None
    assert config.plan_path == path
    assert resolve(config, 4) == PlanCounts(4, 2, 1)
    with pytest.raises(ValueError, match=r"assignment: the plan .* has 4 subnetworks, which do not divide the 3"):
        resolve(config, 3)


@pytest.mark.parametrize("placement", ["packed", "spread"])
def test_a_placement_of_nothing_is_an_error(tmp_path: Path, placement: str) -> None:
    """Without replicas it would have no effect; at coverage 1 neither, but a coverage may be tried without a change."""
    with pytest.raises(ValueError, match=r'placement: got .*, but subnetworks "auto" \(one for each'):
        read(placement=placement)
    by_plan = parse({KEY: {"assignment": save_plan(tmp_path / "plan.json"), "placement": placement}})
    for config in (read(subnetworks=4, placement=placement), by_plan):
        assert config is not None
        with pytest.raises(ValueError, match=r"placement: got .*, but 4 subnetworks on 4 data-parallel ranks have no"):
            resolve(config, 4)
        assert resolve(config, 8).num_replicas == 2
    assert resolve(read(coverage=1.0, subnetworks=4, placement=placement), 8) == PlanCounts(4, 4, 2)


def test_missing_plan_names_the_path(tmp_path: Path) -> None:
    config = parse({KEY: {"assignment": str(tmp_path / "no.json")}})
    assert config is not None
    with pytest.raises(ValueError, match=r"no\.json' cannot be read: No such file"):
        resolve(config, 4)
