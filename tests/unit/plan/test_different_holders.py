"""Plans whose units have different numbers of holders: format, figures, and what a model's rules make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.assignment.graph import Holders
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.units import Piece, Unit, UnitCost
from tests.helpers.models import SPECIMENS, llama

UNITS = tuple(Unit(f"layers.{i}", (Piece(f"layers.{i}.w", None, 0, 4),)) for i in range(3))
PLAN = Plan("forward", "block", 3, None, 0, UNITS, ((0, 1, 2), (0, 1), (2,)), (0, 1, 2))


def test_they_survive_json_as_version_2() -> None:
    data = json.loads(json.dumps(PLAN.to_json()))
    assert (data["version"], data["num_holders"]) == (2, None)
    assert Plan.from_json(data) == PLAN
    assert replace(PLAN, num_holders=2, holders=((0, 1), (1, 2), (0, 2))).to_json()["version"] == 1


def test_a_number_that_all_have_must_be_said() -> None:
    """One table has one hash."""
    with pytest.raises(ValueError, match="num_holders: got null, but every unit has 2 holders"):
        replace(PLAN, holders=((0, 1), (1, 2), (0, 2)))
    with pytest.raises(ValueError, match=r"unit 'layers\.1' has no holders"):
        replace(PLAN, holders=((0, 1, 2), (), (2,)))
    with pytest.raises(ValueError, match=r"unit 'layers\.0' has 3 holders, but every unit needs num_holders = 2"):
        replace(PLAN, num_holders=2)


def test_coverage_of_units_and_of_the_plan() -> None:
    assert [PLAN.coverage_of(u) for u in range(3)] == pytest.approx([1, 2 / 3, 1 / 3])
    assert PLAN.coverage == pytest.approx(2 / 3)
    assert PLAN.mean_coverage([1, 1, 4]) == pytest.approx((3 + 2 + 4) / 18)
    assert not PLAN.is_whole
    assert replace(PLAN, num_holders=3, holders=((0, 1, 2),) * 3).is_whole


def test_spectral_gap_by_hand() -> None:
    """A unit counts 1/p for each pair of its holders: 1/3 + 1/2 for the first two and between them, 1/3 with the third,
    which has 4/3 for itself. Row sums are 2, so (1, 1, -2) has the eigenvalue (5/6 + 5/6 - 2/3) / 2 = 1/2, and
    (1, -1, 0) has 0."""
    assert PLAN.spectral_gap() == pytest.approx(0.5)


def test_the_table_says_the_range_and_weighs_by_flops() -> None:
    costs = [UnitCost(4, 16, 8), UnitCost(4, 16, 8), UnitCost(4, 16, 32)]
    text = PLAN.table(costs)
    assert "3 units, 3 subnetworks, 1 to 3 holders, 6 in all (coverage 0.5), regime forward" in text
    assert "coverage 0.6667" in PLAN.table()
    assert "layers.0  ###" in text


def plan_of(rules: Any, k: int = 4, **block: Any) -> Plan:
    config = parse({KEY: {"coverage": rules, **block}})
    assert config is not None
    return plan_model(SPECIMENS["llama"].build(), config, k)[0]


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_a_model_by_depth_and_by_name(strategy: str, tmp_path: Path) -> None:
    """Layers are counted in the model; what was planned comes back from its file, without rules."""
    rules = [{"units": "attention", "coverage": 0.75}, {"profile": "linear", "first": 0.5, "last": 1.0}]
    plan = plan_of(rules, strategy=strategy)
    last = max(int(unit.name.split(".")[2]) for unit in plan.units)
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        layer = int(unit.name.split(".")[2])
        expected = 3 if "attention" in unit.name else {0: 2, last: 4}.get(layer, len(holders))
        assert len(holders) == expected, unit.name
    plan.save(tmp_path / "plan.json")
    config = parse({KEY: {"assignment": str(tmp_path / "plan.json"), "strategy": strategy}})
    assert config is not None
    again, _ = plan_model(SPECIMENS["llama"].build(), config, 4)
    assert again.hash == plan.hash


def test_layers_without_units_are_ends_too() -> None:
    """Of six layers the first and the last are shared: no other takes their place."""
    model = llama(6)

    def numbers(rule: dict[str, Any]) -> dict[int, int]:
        config = parse({KEY: {"coverage": rule, "shared": [r"layers\.[05]\."]}})
        assert config is not None
        plan, _ = plan_model(model, config, 6)
        return {int(u.name.split(".")[2]): len(h) for u, h in zip(plan.units, plan.holders, strict=True)}

    assert numbers({"profile": "linear", "first": 1.0, "last": 1 / 6}) == {1: 5, 2: 4, 3: 3, 4: 2}
    assert numbers({"coverage": 0.5, "whole_ends": 2}) == {1: 6, 2: 3, 3: 3, 4: 6}


def test_rules_that_give_one_number_are_the_plan_of_that_number() -> None:
    assert plan_of([{"units": "mlp", "coverage": 0.5}, {"coverage": 0.5}]).hash == plan_of(0.5).hash


def test_a_table_with_other_numbers_than_asked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table of a plan could tell: two units that traded places are as good a table."""
    rules = [{"units": "mlp", "coverage": 0.5}, {"coverage": 0.75}]
    balanced = assignment.balanced

    def traded(*args: Any, **options: Any) -> Holders:
        first, second, *rest = balanced(*args, **options)
        return second, first, *rest

    monkeypatch.setattr(assignment, "balanced", traded)
    with pytest.raises(RuntimeError, match=r"0\.attention' has 2 .* of 3, .*0\.mlp' has 3 .* of 2"):
        plan_of(rules)
