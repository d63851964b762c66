"""Where replicas go: every subnetwork gets its ranks, and the bytes between nodes are what the exchange sends."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.routes import routes_back
from sdp_deepspeed.layout.buckets import Bucket, build_segments
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.plan.placement import (
    Load,
    Network,
    Placement,
    bytes_between_nodes,
    choose_placement,
    node_of_process,
    packed,
    spread,
)
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.models import family

WAYS: dict[Any, Any] = {"packed": packed, "spread": spread}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[str, ...], int]:
    """Nodes of any sizes, their ranks in any order, and a number of subnetworks that divides the ranks."""
    k = draw(st.integers(1, 5))
    num_ranks = k * draw(st.integers(1, 5))
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=num_ranks, max_size=num_ranks))
    return tuple(nodes if draw(st.booleans()) else sorted(nodes)), k


@st.composite
def loads(draw: st.DrawFn, k: int) -> Load:
    p = draw(st.integers(1, k))
    units = draw(st.lists(st.tuples(st.permutations(range(k)), st.integers(0, 1000)), max_size=5))
    holders = [tuple(sorted(order[:p])) for order, _ in units]
    return Load(k, holders, [size for _, size in units], draw(st.integers(0, 1000)), draw(st.booleans()))


@given(clusters())
def test_every_subnetwork_has_equally_many_ranks(cluster: tuple[tuple[str, ...], int]) -> None:
    nodes, k = cluster
    for way in WAYS.values():
        assert Counter(way(nodes, k)) == dict.fromkeys(range(k), len(nodes) // k)


@given(clusters())
def test_packed_subnetworks_are_whole_where_they_can_be(cluster: tuple[tuple[str, ...], int]) -> None:
    nodes, k = cluster
    r = len(nodes) // k
    found = packed(nodes, k)
    whole = [s for s in range(k) if len({node for node, other in zip(nodes, found, strict=True) if other == s}) == 1]
    assert len(whole) == sum(size // r for size in Counter(nodes).values())


@given(clusters())
def test_spread_subnetworks_are_even_on_each_node(cluster: tuple[tuple[str, ...], int]) -> None:
    nodes, k = cluster
    counts = Counter(zip(nodes, spread(nodes, k), strict=True))
    for node, size in Counter(nodes).items():
        assert {counts[node, s] for s in range(k)} <= {size // k, -(-size // k)}


def test_ways_by_hand() -> None:
    two_nodes = ("a",) * 4 + ("b",) * 4
    assert packed(two_nodes, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert spread(two_nodes, 4) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert spread(two_nodes, 2) == (0, 1, 0, 1, 0, 1, 0, 1)
    by_turns = ("a", "b") * 4
    assert packed(by_turns, 4) == (0, 2, 0, 2, 1, 3, 1, 3)
    assert spread(by_turns, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    unequal = ("a",) * 3 + ("b",) * 5  # one rank is left on each
    assert packed(unequal, 4) == (0, 0, 3, 1, 1, 2, 2, 3)


@pytest.mark.parametrize(("num_nodes", "size", "k"), [(1, 4, 2), (2, 4, 4), (2, 4, 2), (4, 2, 4), (3, 2, 1)])
def test_packed_is_the_same_on_one_node(num_nodes: int, size: int, k: int) -> None:
    """Equal nodes in order: a checkpoint resumes on other machines of as many ranks."""
    nodes = [rank // size for rank in range(num_nodes * size)]
    assert (
        packed(nodes, k) == packed([0] * len(nodes), k) == tuple(rank * k // len(nodes) for rank in range(len(nodes)))
    )


def by_nodes(load: Load, network: Network, ranks: Sequence[int]) -> int:
    """Unit by unit, from the sets of nodes that its holders are on; the shared rest is one that everybody holds."""

    def sent(subnetworks: Sequence[int], elements: int) -> int:
        holding = {network.nodes[rank] for rank, subnetwork in enumerate(ranks) if subnetwork in subnetworks}
        getting = set(network.nodes) if load.all_receive_weights else holding
        there, back = len(holding) - 1, len(getting) - 1  # each other node's sum, and each other node's copy
        return elements * (there * network.gradient_bytes + back * network.weight_bytes)

    units = sum(sent(*unit) for unit in zip(load.holders, load.elements, strict=True))
    return units + sent(range(load.num_subnetworks), load.num_shared)


@given(clusters().flatmap(lambda c: st.tuples(st.just(c[0]), loads(c[1]))), st.sampled_from([2, 4, 12]), st.randoms())
def test_bytes_are_those_of_the_nodes_of_each_unit(
    case: tuple[tuple[str, ...], Load], gradient_bytes: int, chance: Any
) -> None:
    nodes, load = case
    network = Network(nodes, gradient_bytes, 2)
    anyhow = [rank % load.num_subnetworks for rank in range(len(nodes))]
    chance.shuffle(anyhow)
    for ranks in (packed(nodes, load.num_subnetworks), spread(nodes, load.num_subnetworks), anyhow):
        assert bytes_between_nodes(load, network, ranks) == by_nodes(load, network, ranks)


@given(clusters().flatmap(lambda c: st.tuples(st.just(c[0]), loads(c[1]))))
def test_auto_takes_what_sends_fewer_bytes(case: tuple[tuple[str, ...], Load]) -> None:
    nodes, load = case
    assume(load.num_subnetworks < len(nodes))  # else there is nothing to choose
    network = Network(nodes, 2, 4)
    sent = {name: by_nodes(load, network, way(nodes, load.num_subnetworks)) for name, way in WAYS.items()}
    placement, ranks = choose_placement(load, network)
    assert (placement.packed_bytes, placement.spread_bytes) == (sent["packed"], sent["spread"])
    assert sent[placement.name] == min(sent.values())
    assert placement.name == "packed" or sent["packed"] > sent["spread"]
    assert ranks == WAYS[placement.name](nodes, load.num_subnetworks)
    for name, way in WAYS.items():
        by_config = dataclasses.replace(placement, name=name, by_config=True)
        assert choose_placement(load, network, name) == (by_config, way(nodes, load.num_subnetworks))


@given(st.integers(1, 4).flatmap(loads), st.integers(1, 3))
def test_nothing_leaves_a_single_node(load: Load, replicas: int) -> None:
    placement, _ = choose_placement(load, Network(("here",) * (load.num_subnetworks * replicas)))
    assert placement == Placement("packed", 1, 0, 0, has_replicas=replicas > 1)


@given(loads(5), st.sampled_from(["auto", *WAYS]))
def test_without_replicas_each_rank_has_the_subnetwork_of_its_number(load: Load, asked: Any) -> None:
    network = Network(tuple("abcab"), 2, 4)
    placement, ranks = choose_placement(load, network, asked)
    assert (ranks, placement.packed_bytes) == (tuple(range(5)), by_nodes(load, network, ranks))


def test_without_replicas_the_line_says_what_crosses() -> None:
    placement, ranks = choose_placement(Load(4, [(0, 1), (2, 3)], [5, 5]), Network(("a", "b", "a", "b"), 1, 1))
    assert (placement.line(), ranks) == ("traffic: 2e-05 MB between 2 nodes per step", (0, 1, 2, 3))


@given(clusters().flatmap(lambda c: st.tuples(st.just(c[0]), loads(c[1]))))
def test_names_of_nodes_do_not_matter(case: tuple[tuple[str, ...], Load]) -> None:
    nodes, load = case
    renamed: tuple[Hashable, ...] = tuple(("rack", 900 - ord(node)) for node in nodes)
    assert choose_placement(load, Network(nodes)) == choose_placement(load, Network(renamed))


def test_bytes_by_hand() -> None:
    """2 nodes of 2 ranks, a unit of 8 elements for each of 2 subnetworks, 4 shared elements; 2 bytes there, 4 back.

    The shared cross once there and once back. So does a spread unit, and a packed one does not; in the backward regime
    it crosses on its way back.
    """
    network = Network(("a", "a", "b", "b"), 2, 4)
    forward = Load(2, [(0,), (1,)], [8, 8], 4)
    assert choose_placement(forward, network)[0] == Placement("packed", 2, 4 * 6, 4 * 6 + 2 * 8 * 6)
    backward = dataclasses.replace(forward, all_receive_weights=True)
    assert choose_placement(backward, network)[0] == Placement("packed", 2, 4 * 6 + 2 * 8 * 4, 4 * 6 + 2 * 8 * 6)


def test_spread_wins_on_uneven_nodes() -> None:
    """One rank is alone, so one subnetwork is split: packed splits the last, spread the first."""
    network = Network(("alone", "b", "b", "b"))
    light_first = Load(2, [(0,), (1,)], [1, 100])
    placement, ranks = choose_placement(light_first, network)
    assert (placement.name, ranks) == ("spread", (0, 1, 0, 1))
    placement, ranks = choose_placement(Load(2, [(0,), (1,)], [100, 1]), network)
    assert (placement.name, ranks) == ("packed", (1, 0, 0, 1))


def crossing(bucket: Bucket, nodes: Nodes, network: Network, receivers: Receivers) -> int:
    """Bytes between nodes by the exchange's own routes."""
    there = [routes_back(bucket, rank, nodes, "holders")[0].received for rank in range(len(network.nodes))]
    back = [routes_back(bucket, rank, nodes, receivers)[0].sent for rank in range(len(network.nodes))]
    numbers = [sum(sum(half.splits) for half in halves) for halves in (there, back)]
    return numbers[0] * network.gradient_bytes + numbers[1] * network.weight_bytes


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("labels", ["aaabbb", "ababab", "abbbbb", "aabbcc"])
@pytest.mark.parametrize("way", WAYS)
def test_the_exchange_sends_as_much(regime: str, labels: str, way: str) -> None:
    units = tuple(Unit(f"u{i}", (Piece(f"w{i}", None, 0, 61),)) for i in range(3))
    plan = Plan(regime, "block", 3, 2, 0, units, ((0, 1), (1, 2), (0, 2)), WAYS[way](tuple(labels), 3))
    network, nodes = Network(tuple(labels), 2, 4), Nodes.of(labels)
    tensors = [TensorInfo(name, (61,), torch.float32, 0) for name in ("w0", "w1", "w2", "shared")]
    load = Load(3, plan.holders, [61] * 3, 61, regime == "backward")
    segments = build_segments(tensors, plan, max_elements=10**6, nodes=nodes)
    sent = crossing(Bucket(0, tuple(segments)), nodes, network, "all" if regime == "backward" else "holders")
    assert bytes_between_nodes(load, network, plan.subnetwork_of_rank) == sent > 0


def test_lines() -> None:
    alone = Placement("packed", 2, 12_300_000, 12_300_000, has_replicas=False)
    assert alone.line() == "traffic: 12.3 MB between 2 nodes per step"
    assert Placement("packed", 1, 0, 0).line() == "placement: packed; all ranks are on one node"
    assert (
        Placement("packed", 2, 0, 12_300_000).line()
        == "placement: packed; 0 MB between 2 nodes per step, spread would send 12.3 MB"
    )
    assert (
        Placement("spread", 3, 5_000, 12_300_000, by_config=True).line()
        == "placement: spread, as configured; 12.3 MB between 3 nodes per step, packed would send 0.005 MB"
    )
    assert Placement("packed", 2, 7_000_000, 7_000_000).line().endswith("7 MB between 2 nodes per step, spread as much")


def test_node_of_a_process() -> None:
    """Ranks are neighbors where host and launcher's number agree."""
    assert node_of_process({}, "host") == node_of_process({"LOCAL_WORLD_SIZE": "4"}, "host")
    torchrun = [node_of_process({"GROUP_RANK": number}, "host") for number in "01"]
    launcher = [node_of_process({"CROSS_RANK": number}, "host") for number in "01"]
    assert torchrun == launcher
    assert len(set(torchrun)) == 2
    assert node_of_process({"GROUP_RANK": "0"}, "other") not in torchrun


class Gathered:
    """A communicator that is given what the others said."""

    def __init__(self, others: Sequence[Any]) -> None:
        self.others = others

    def gather_objects(self, value: object) -> list[Any]:
        return [value, *self.others]


def test_network_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    ranks = cast("Communicator", Gathered(["x", "y"]))
    network = Network.gather(ranks, gradient_bytes=2, weight_bytes=4)
    assert (network.nodes[1:], network.gradient_bytes, network.weight_bytes) == (("x", "y"), 2, 4)
    assert str(network.nodes[0]).endswith("/3")
    peers = cast("Communicator", Gathered(["elsewhere"]))
    workers = Network.gather(ranks, tp_group=peers, gradient_bytes=2, weight_bytes=4)
    assert workers.nodes[0] == (network.nodes[0], "elsewhere")


def planned(network: Network | None, frozen: str = "", **settings: Any) -> Plan:
    block = parse({KEY: {"holders": 1, "subnetworks": 2, **settings}})
    assert block is not None
    model = family("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    return plan_model(model, block, 4, network)[0]


def test_plan_of_a_model() -> None:
    network = Network(("a", "a", "b", "b"), 2, 4)
    plan = planned(network)
    assert plan.placement is not None
    assert (plan.placement.name, plan.subnetwork_of_rank) == ("packed", (0, 0, 1, 1))
    assert plan.placement.line() in plan.table()
    shapes = {name: value.numel() for name, value in family("llama").named_parameters()}
    units = sum(size for name, size in shapes.items() if ".layers." in name)
    shared = sum(shapes.values()) - units
    assert plan.placement == Placement("packed", 2, shared * 6, shared * 6 + units * 6)
    spread_plan = planned(network, placement="spread")
    assert (spread_plan.subnetwork_of_rank, spread_plan.hash) == ((0, 1, 0, 1), plan.hash)
    assert planned(None).placement == Placement("packed", 1, 0, 0)


def test_traffic_between_nodes_is_told_without_replicas_too() -> None:
    plan = planned(Network(("a", "a", "b", "b"), 2, 4), subnetworks="auto", holders=2)
    assert plan.subnetwork_of_rank == (0, 1, 2, 3)
    assert plan.placement is not None
    assert not plan.placement.has_replicas
    assert plan.placement.line() in plan.table()
    assert planned(Network(("a",) * 4), subnetworks="auto", holders=2).placement is None


def test_frozen_parameters_are_not_sent() -> None:
    network = Network(("a", "a", "b", "b"), 2, 4)
    whole, units, shared = (planned(network, frozen).placement for frozen in ("", "embed", ".layers."))
    assert whole is not None
    assert units is not None
    assert shared is not None
    assert units.spread_bytes - units.packed_bytes == whole.spread_bytes - whole.packed_bytes > 0
    assert units.packed_bytes < whole.packed_bytes
    assert shared.spread_bytes == shared.packed_bytes == whole.packed_bytes
