"""Plans: JSON round trip, hash, checks, gap, printing, and what the config makes of them."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.plan.counts import resolve
from sdp_deepspeed.plan.placement import Network
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import make_plan
from sdp_deepspeed.plan.spectral_gap import spectral_gap
from sdp_deepspeed.units import Piece, Unit, UnitCost

COST = UnitCost(num_parameters=4, num_bytes=16, flops=8)


def units(count: int) -> tuple[Unit, ...]:
    return tuple(
        Unit(f"layers.{i}", (Piece(f"layers.{i}.w", 1, 2, 3), Piece(f"layers.{i}.b", None, 0, 4, "buffer")))
        for i in range(count)
    )


def example_plan(**changes: Any) -> Plan:
    plan = Plan(
        regime="forward",
        strategy="block",
        num_subnetworks=3,
        num_holders=2,
        seed=5,
        units=units(3),
        holders=((0, 1), (1, 2), (0, 2)),
        subnetwork_of_rank=(0, 1, 2),
    )
    return dataclasses.replace(plan, **changes)


def block(**settings: Any) -> SubnetworkConfig:
    config = parse({KEY: settings})
    assert config is not None
    return config


def test_lookups() -> None:
    plan = example_plan(subnetwork_of_rank=(0, 0, 1, 1, 2, 2))
    assert plan.coverage == pytest.approx(2 / 3)
    assert plan.units_of(0) == (0, 2)
    assert plan.ranks_of(1) == (2, 3, 4, 5)
    assert plan.holds(0, 1)
    assert not plan.holds(0, 2)
    assert plan.holds_rank(0, 3)
    assert not plan.holds_rank(0, 4)


def test_json_format() -> None:
    data = example_plan().to_json()
    assert list(data) == [
        "version",
        "hash",
        "regime",
        "strategy",
        "num_subnetworks",
        "num_holders",
        "seed",
        "subnetwork_of_rank",
        "units",
    ]
    assert data["version"] == 1
    assert data["units"][0] == {
        "name": "layers.0",
        "pieces": [
            {"parameter": "layers.0.w", "kind": "parameter", "dim": 1, "start": 2, "length": 3},
            {"parameter": "layers.0.b", "kind": "buffer", "dim": None, "start": 0, "length": 4},
        ],
        "holders": [0, 1],
    }


@pytest.mark.parametrize("strategy", ["block", {"attention": "neuron", "mlp": "block"}])
def test_save_and_load(tmp_path: Path, strategy: Any) -> None:
    plan = example_plan(strategy=strategy)
    path = tmp_path / "new" / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert os.listdir(path.parent) == ["plan.json"]
    assert path.stat().st_mode & 0o444 == 0o444


def test_failed_save_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    example_plan().save(path)

    def fail(_fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        example_plan(regime="backward").save(path)
    assert Plan.load(path) == example_plan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_hash_covers_what_decides_the_training() -> None:
    plan = example_plan()
    same = [plan, example_plan(seed=6), example_plan(subnetwork_of_rank=(2, 1, 0)), example_plan(strategy="block")]
    assert len({p.hash for p in same}) == 1
    other_units = (dataclasses.replace(plan.units[0], name="x"), *plan.units[1:])
    different = [
        plan,
        example_plan(regime="backward"),
        example_plan(strategy="neuron"),
        example_plan(strategy={"mlp": "block"}),
        example_plan(holders=((0, 1), (1, 2), (1, 2))),
        example_plan(units=other_units),
        example_plan(num_holders=3, holders=((0, 1, 2),) * 3),
    ]
    assert len({p.hash for p in different}) == len(different)


def test_hash_is_stable_over_releases() -> None:
    """Checkpoints and running jobs compare it: it may only change with the format's version."""
    assert example_plan().hash == "f0f9a2694e5a03e01e0066981b1a2a4ff570cbcd37a4b69333b3667bf3afc904"


def test_hash_ignores_the_order_of_a_mapping() -> None:
    a, b = {"attention": "neuron", "mlp": "block"}, {"mlp": "block", "attention": "neuron"}
    assert example_plan(strategy=a).hash == example_plan(strategy=b).hash


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_any_plan_survives_json(k: int, num_units: int, data: st.DataObject) -> None:
    p = data.draw(st.integers(-(-k // num_units), k))
    holders = tuple(tuple(sorted((u * p + j) % k for j in range(p))) for u in range(num_units))
    plan = Plan("backward", "neuron", k, p, 1, units(num_units), holders, tuple(range(k)) * 2)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plans_written_by_hand_need_no_hash() -> None:
    data = example_plan().to_json()
    del data["hash"]
    assert Plan.from_json(data) == example_plan()


def test_units_and_holders_must_match() -> None:
    with pytest.raises(ValueError, match="3 units but holders for 2"):
        example_plan(holders=((0, 1), (1, 2)))


def test_spectral_gap_by_hand() -> None:
    """Three subnetworks, each pair shares one unit: W = (2 I + (J - I)) / 4 has eigenvalues 1, 1/4, 1/4."""
    assert example_plan().spectral_gap() == pytest.approx(0.75)
    assert spectral_gap(((0, 1, 2),) * 4, [1] * 4, 3) == pytest.approx(1.0)
    assert spectral_gap(((0,),), [1], 1) == 1.0


def test_spectral_gap_of_unequal_units_by_hand() -> None:
    """Both hold a unit of weight 1, which counts a half for each pair; the first alone one of weight 2.

    Sums [[5/2, 1/2], [1/2, 1/2]] divided by their row sums 3 and 1: trace 5/6 + 1/2, eigenvalues 1 and 1/3.
    """
    assert spectral_gap(((0, 1), (0,)), [1, 2], 2) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("holders", "weights"), [(((0, 1), (2, 3)), [1, 1]), (((0, 1), (1, 2), (2, 3)), [1, 0, 1]), (((0, 1, 2, 3),), [0])]
)
def test_spectral_gap_of_a_graph_that_falls_apart(holders: Any, weights: list[int]) -> None:
    assert spectral_gap(holders, weights, 4) == 0.0


def test_table() -> None:
    text = example_plan().table([COST, COST, UnitCost(4, 16, 24)])
    assert "layers.0  ##." in text
    assert "layers.1  .##" in text
    assert "FLOPs max/mean 1.2000" in text
    assert "bytes max/mean 1.0000" in text
    assert "spectral gap 0.7500" in text
    assert example_plan().hash[:16] in text
    assert "FLOPs" not in example_plan().table()
    many = Plan("forward", "block", 2, 1, 0, units(100), ((0,), (1,)) * 50, (0, 1)).table([COST] * 100)
    assert "+36 more units" in many
    assert "bytes max/mean 1 (all zero)" in example_plan().table([UnitCost(0, 0, 0)] * 3)


@pytest.mark.parametrize("name", ["balanced", "cyclic"])
def test_make_plan(name: str) -> None:
    config = block(coverage=0.5, assignment=name)
    plan = make_plan(units(8), [COST] * 8, resolve(config, 4), config, 4)
    assert (plan.num_subnetworks, plan.num_holders, plan.coverage) == (4, 2, 0.5)
    assert plan.subnetwork_of_rank == (0, 1, 2, 3)
    assert plan.units == units(8)
    assert plan == make_plan(units(8), [COST] * 8, resolve(config, 4), config, 4)


def test_assignment_and_seed_have_an_effect() -> None:
    configs = [block(coverage=0.5, assignment="cyclic"), *(block(coverage=0.5, seed=seed) for seed in range(3))]
    plans = [make_plan(units(8), [COST] * 8, resolve(config, 4), config, 4) for config in configs]
    assert len({plan.hash for plan in plans}) > 2
    assert [plan.seed for plan in plans] == [0, 0, 1, 2]


def test_plan_given_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    example_plan().save(path)
    config = block(assignment=str(path))
    plan = make_plan((), (), resolve(config, 3), config, 3)
    assert plan == example_plan()


def test_replicas_of_subnetworks() -> None:
    """Each has as many ranks; the table, its hash and its gap are those of k workers."""
    config = block(coverage=0.5, subnetworks=4)
    plan = make_plan(units(8), [COST] * 8, resolve(config, 8), config, 8)
    assert plan.subnetwork_of_rank == (0, 0, 1, 1, 2, 2, 3, 3)
    alone = make_plan(units(8), [COST] * 8, resolve(config, 4), config, 4)
    assert (plan.holders, plan.hash, plan.spectral_gap()) == (alone.holders, alone.hash, alone.spectral_gap())
    assert len(plan.ranks_of(0)) == 4
    single = block(coverage=1.0, subnetworks=1)
    whole = make_plan(units(8), [COST] * 8, resolve(single, 3), single, 3)
    assert (whole.holders, whole.subnetwork_of_rank, whole.spectral_gap()) == (((0,),) * 8, (0, 0, 0), 1.0)


def test_placed_plan(tmp_path: Path) -> None:
    """Where replicas are is printed, and no part of plan.json but for the ranks: the next run has its own nodes."""
    plan = example_plan(subnetwork_of_rank=(0, 0, 1, 1, 2, 2))
    assert "placement" not in plan.table()
    placed = plan.place([60] * 3, 0, Network(("a", "a", "a", "b", "b", "b"), 2, 2), "spread")
    assert placed.subnetwork_of_rank == (0, 1, 2, 0, 1, 2)
    # Three units of 60 elements cross once each way, 2 bytes each. Packed as (0 0 2 | 1 1 2) all cross too.
    words = "placement: spread, as configured; 0.00072 MB between 2 nodes per step, packed as much"
    assert words in placed.table()
    assert placed.hash == plan.hash
    placed.save(tmp_path / "plan.json")
    assert set(json.loads((tmp_path / "plan.json").read_text())) == set(example_plan().to_json())
    again = Plan.load(tmp_path / "plan.json")
    assert again == placed
    assert again.placement is None
    config = block(assignment=str(tmp_path / "plan.json"))
    assert make_plan((), (), resolve(config, 6), config, 6) == plan
    assert make_plan((), (), resolve(config, 3), config, 3) == example_plan()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"regime": "backward"}, "regime is 'forward' in the plan and 'backward' here"),
        ({"strategy": "neuron"}, "strategy is 'block' in the plan and 'neuron' here"),
        ({"holders": 1}, "holders is 2 in the plan and 1 here"),
        ({"coverage": 1.0}, "holders is 2 in the plan and 3 here"),
    ],
)
def test_plan_that_contradicts_the_config(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    path = tmp_path / "mine.json"
    example_plan().save(path)
    config = block(assignment=str(path), **settings)
    with pytest.raises(ValueError, match=expected):
        make_plan((), (), resolve(config, 3), config, 3)


@pytest.mark.parametrize("name", ["balanced", "cyclic"])
def test_make_plan_keeps_a_unit_of_each_branch(name: str) -> None:
    config = block(holders=1, assignment=name, strategy="neuron", neuron_groups=2)
    costs, branches = [COST, COST, COST, COST], ["a", "b", "a", "b"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make_plan(units(4), costs, resolve(config, 2), config, 2, branches)
        assert {plan.holders[0], plan.holders[2]} == {plan.holders[1], plan.holders[3]} == {(0,), (1,)}
    with pytest.raises(ValueError, match="branch 'b': 1 units with 1 holders"):
        make_plan(units(4), costs, resolve(config, 2), config, 2, ["a", "b", "a", "a"])


def test_one_warning_when_the_graph_cannot_be_connected() -> None:
    config = block(holders=1)
    with pytest.warns(UserWarning, match=r"4 units with 1 holders .* connect 3 subnetworks.* raise holders$") as caught:
        make_plan(units(4), [COST] * 4, resolve(config, 3), config, 3)  # finer units would not help
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"^2 subnetworks share no unit .* coverage 0\.5 take 4 ranks"):
        make_plan(units(4), [COST] * 4, resolve(config, 2), config, 2)
    with pytest.warns(UserWarning, match='here 3: raise holders, or use finer units: granularity "sublayer", or'):
        make_plan(units(3), [COST] * 3, resolve(block(holders=2), 6), block(holders=2), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = block(holders=2)
        make_plan(units(4), [COST] * 4, resolve(config, 3), config, 3)


def test_too_few_units_for_the_ranks() -> None:
    config = block(holders=1)
    with pytest.raises(ValueError, match="2 units with 1 holders each cannot give each of 3 subnetworks a unit"):
        make_plan(units(2), [COST] * 2, resolve(config, 3), config, 3)
