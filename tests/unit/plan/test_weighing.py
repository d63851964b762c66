"""`assignment: "auto"`: fewer bytes between nodes where the spectral gap allows it, and what is told and stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan import weighing
from sdp_deepspeed.plan.placement import Network, Weighed, nodes_of_subnetworks
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers.models import family

HALVES = ("a",) * 4 + ("b",) * 4
NEURONS: dict[str, Any] = {"strategy": {"attention": "block", "mlp": "neuron"}, "neuron_groups": 24}


def planned(nodes: tuple[str, ...] | None, num_ranks: int = 8, **settings: Any) -> tuple[Plan, list[str]]:
    block = parse({KEY: {"coverage": 0.5, "assignment": "auto", **settings}})
    assert block is not None
    return plan_model(family("llama"), block, num_ranks, None if nodes is None else Network(nodes, 2, 4))


def sent(plan: Plan) -> int:
    assert plan.placement is not None
    return plan.placement.sent_bytes


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_fewer_bytes_for_some_of_the_gap(regime: str) -> None:
    auto, _ = planned(HALVES, regime=regime, **NEURONS)
    balanced, _ = planned(HALVES, regime=regime, assignment="balanced", **NEURONS)
    weights = [cost.num_parameters for cost in unit_costs(family("llama"), auto.units)]
    gaps = [plan.spectral_gap(weights) for plan in (auto, balanced)]
    assert sent(auto) < sent(balanced)
    assert 0.75 * gaps[1] <= gaps[0] < gaps[1]
    assert auto.weighed == Weighed(gaps[1], sent(balanced))
    assert auto.node_of_subnetwork == (0, 0, 0, 0, 1, 1, 1, 1)
    assert balanced.node_of_subnetwork is None
    assert (auto.subnetwork_of_rank, auto.num_holders) == (tuple(range(8)), 4)


def test_table_has_both_figures() -> None:
    auto, _ = planned(HALVES, **NEURONS)
    costs = unit_costs(family("llama"), auto.units)
    text = auto.table(costs)
    assert f"spectral gap {auto.spectral_gap([cost.num_parameters for cost in costs]):.4f}" in text
    assert f"traffic: {sent(auto) / 1e6:.4g} MB between 2 nodes per step" in text
    assert auto.weighed is not None
    assert auto.weighed.line() in text
    assert (
        Weighed(0.8571, 2_340_000_000).line()
        == "assignment: holders on few nodes; balanced has: spectral gap 0.8571, 2.34 GB between nodes per step"
    )


def test_the_ranks_nodes_decide_in_any_order() -> None:
    by_turns, _ = planned(("a", "b") * 4, **NEURONS)
    balanced, _ = planned(("a", "b") * 4, assignment="balanced", **NEURONS)
    assert by_turns.node_of_subnetwork == (0, 1) * 4
    assert sent(by_turns) < sent(balanced)


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (None, {}),
        (("a",) * 8, {}),
        (("a",) * 8, {"subnetworks": 4}),
        (HALVES, {"subnetworks": 2}),
        (HALVES, {"subnetworks": 4, "placement": "spread"}),
        (HALVES, {"coverage": 1.0}),
    ],
    ids=["unknown", "one node", "replicas on one node", "a subnetwork for each node", "spread", "C = 1"],
)
def test_balanced_where_nothing_is_to_gain(nodes: tuple[str, ...] | None, settings: dict[str, Any]) -> None:
    auto, _ = planned(nodes, **NEURONS, **settings)
    balanced, _ = planned(nodes, assignment="balanced", **NEURONS, **settings)
    assert auto == balanced
    assert auto.to_json() == balanced.to_json()
    lines = set(auto.table().splitlines()) - set(balanced.table().splitlines())
    several = nodes is not None and len(set(nodes)) > 1
    assert lines == ({f"  {Weighed().line()}"} if several else set())
    assert Weighed().line() == (
        "assignment: balanced; no other keeps 3/4 of its spectral gap and sends less between nodes"
    )


def test_what_sends_as_much_is_not_taken() -> None:
    """Where subnetworks are on two nodes each, fewer of such pairs may still be as many nodes."""
    balanced, _ = planned(HALVES, assignment="balanced", **NEURONS)
    with mock.patch.object(weighing, "on_few_nodes", side_effect=lambda costs, holders, *_, **__: holders):
        auto, _ = planned(HALVES, **NEURONS)
    assert auto == balanced
    assert auto.weighed == Weighed()


def test_replicas_and_nodes() -> None:
    """Four subnetworks of two replicas, packed: two subnetworks on each of two nodes."""
    nodes = nodes_of_subnetworks(Network(HALVES), 4, "auto")
    assert nodes == (0, 0, 1, 1)
    assert nodes_of_subnetworks(Network(HALVES), 4, "spread") == (0, 0, 0, 0)
    assert nodes_of_subnetworks(Network(("a", "b") * 4), 8, "auto") == (0, 1) * 4
    split = nodes_of_subnetworks(Network(("a",) * 3 + ("b",) * 2 + ("c",)), 3, "packed")
    assert split == (0, 1, 2)  # the last one is on the first node and the last
    auto, _ = planned(("a",) * 8 + ("b",) * 8, 16, subnetworks=8, **NEURONS)
    assert auto.node_of_subnetwork == (0, 0, 0, 0, 1, 1, 1, 1)
    assert auto.placement is not None
    assert auto.placement.name == "packed"


def test_what_the_plan_knows_of_nodes_is_saved(tmp_path: Path) -> None:
    auto, _ = planned(HALVES, **NEURONS)
    path = tmp_path / "plan.json"
    auto.save(path)
    data = json.loads(path.read_text())
    assert data["node_of_subnetwork"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert Plan.load(path) == auto
    block: dict[str, Any] = {"assignment": str(path), "strategy": NEURONS["strategy"]}
    again, warnings = planned(HALVES, **block)
    assert (again, warnings) == (auto, [])
    elsewhere, warnings = planned(("a",) * 2 + ("b",) * 6, **block)
    assert (elsewhere.hash, elsewhere.holders) == (auto.hash, auto.holders)
    assert len(warnings) == 1
    assert f"{str(path)!r} was made for ranks on other nodes" in warnings[0]
    assert planned(None, **block)[1] == []  # one node: nothing is sent
    assert planned(("a",) * 8 + ("b",) * 8, 16, **block)[1] == []  # two replicas each, packed: the same nodes
    for wrong, message in (([0, 1], "got 2 nodes for 8 subnetworks"), ("all", "got 'all', expected list")):
        path.write_text(json.dumps(data | {"node_of_subnetwork": wrong}))
        with pytest.raises(ValueError, match=message):
            Plan.load(path)


def test_hash_leaves_nodes_out() -> None:
    """Two clusters that lead to the same holders train the same."""
    auto, _ = planned(HALVES, **NEURONS)
    data = auto.to_json()
    del data["node_of_subnetwork"]
    assert Plan.from_json(data).hash == auto.hash
