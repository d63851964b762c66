"""Predictions by hand: what they are made of, what they say, and the checks against what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import predict_links
from benchmarks.common.links import Link
from benchmarks.common.models import NARROW, num_parameters
from benchmarks.common.traffic import Traffic, exchanged, rings
from benchmarks.predict_links import PRECISION, checked, checked_between_nodes, compute_seconds, seconds_on_levels
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.per_rank import Setup, estimate
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.models import llama


def test_operations_by_hand() -> None:
    """Two embeddings of 10 x 4, of which the head is used; 100 weights in layers; 2,048 tokens see each other."""
    shape = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2}
    scores = 3.5 * 4 * 2048 * 4 * 2
    tokens = 8 * 2048
    assert compute_seconds(shape, 180, 0.5) * 400e12 == pytest.approx(tokens * (0.5 * (600 + scores) + 240))


def test_rings_by_hand() -> None:
    """Four ranks send three quarters of what they reduce, and of what they gather."""
    found = rings(1000, 4, num_layers=5, precision=PRECISION)
    assert {name: traffic.between for name, traffic in found.items()} == {
        "DDP": 3000.0,  # two bytes of gradients, twice
        "ZeRO-1, ZeRO-2": 4500.0,
        "ZeRO-3, FSDP2": 4500.0,
    }
    assert all(traffic.inside == traffic.between for traffic in found.values())
    assert [traffic.num_between for traffic in found.values()] == [1, 2, 15]


@pytest.mark.parametrize("coverage", [1.0, 0.5])
def test_the_exchange_sends_what_the_estimate_says(coverage: float) -> None:
    """On one node what the estimate says of the rank with the most, and the padding of messages."""
    model = llama(4).to(torch.bfloat16)
    block = parse({KEY: {"coverage": coverage, "subnetworks": 8}})
    assert block is not None
    plan, _ = plan_model(model, block, 8)
    own = {"coverage": coverage, "subnetworks": 8}
    on_one = exchanged(model, own, 8, ranks_per_node=8, precision=PRECISION)
    tensors = [replace(info, group=0) for info in dense_tensors(model)]
    most = max(rank.sent_bytes for rank in estimate(plan, tensors, Setup(2, PRECISION)))
    assert on_one.inside == pytest.approx(most, rel=0.05)
    assert (on_one.between, on_one.num_between) == (0, 0)


def test_levels_of_a_network() -> None:
    traffic = Traffic(inside=450e9, between=10.0, num_inside=0, num_between=2)
    assert seconds_on_levels(traffic, Link(1.0, 5.0)) == (1.0, 4.0)
    assert seconds_on_levels(traffic, None) == (1.0, 0.0)


def test_predictions_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 GPUs on two nodes and in one domain. A model of 3,232 weights, 256 of them embeddings that are its head.

    The exchange takes 3 x 20 us and 0.9 GB at 450 GB/s inside, then 2 ms and 2 MB at 1 MB/s; a ring is as slow as the
    slower of both, and all weights are two bytes: DDP's sends 2 x 15/16 of them, twice."""
    shape = NARROW | {"num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    size = 8 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    asked = []

    def exchanged_(model: Any, block: Any, num_ranks: int, *, ranks_per_node: int, precision: Any) -> Traffic:
        asked.append((block, num_ranks, ranks_per_node))
        return Traffic(inside=0.9e9, between=2e6, num_inside=3, num_between=2)

    monkeypatch.setattr(predict_links, "exchanged", exchanged_)
    monkeypatch.setattr(predict_links, "NUM_GPUS", (8, 16))
    monkeypatch.setattr(predict_links, "COVERAGES", (1.0, 0.5))
    monkeypatch.setattr(predict_links, "BETWEEN", {"one domain": None, "slow": Link(1e-3, 1e6)})
    _, _, together, slow = predict_links.predicted(shape)
    assert (slow["gpus"], slow["between"], together["between"]) == (16, "slow", "one domain")
    block = {"coverage": 0.5, "subnetworks": 8}
    assert [(block, 8, 8), (block, 8, 1), (block, 16, 16), (block, 16, 8)] == asked[1::2]
    found = slow["systems"]
    scores, body, head = 3.5 * 4 * 2048 * 32, size - 2 * 256, 256
    whole = 16384 * (6 * body + 6 * head + scores) / 400e12
    half = 16384 * (3 * body + 6 * head + scores / 2) / 400e12
    assert [found[name]["compute"] for name in found] == pytest.approx([whole] * 4 + [half])
    inside = 3 * 20e-6 + 0.002
    assert found["sdp C=0.5"]["link"] == pytest.approx(inside + 0.002 + 2.0)
    assert together["systems"]["sdp C=0.5"]["link"] == pytest.approx(inside)
    assert found["DDP"]["link"] == pytest.approx(0.001 + 2 * 15 / 16 * 2 * size / 1e6)
    assert found["ZeRO-1, ZeRO-2"]["link"] == pytest.approx(0.002 + 3 * 15 / 16 * 2 * size / 1e6)
    assert together["systems"]["DDP"]["link"] == pytest.approx(20e-6 + 2 * 15 / 16 * 2 * size / 450e9)


LINES_USED = (
    "all_to_all, receives first, a rank late",
    "all_reduce, a rank late",
    "all_gather, a rank late",
    "one way, a rank late",
)


def test_a_check_by_hand() -> None:
    """Without the link 1 second; two messages of 10 MB in all at 5 MB a second, half a second each; what has no line
    (a message's other end) takes nothing."""
    ways = {"send": [2, 10_000_000], "recv_": [2, 0]}
    measured = {"link": "slow", "seconds": {"sdp C=1": [3.0, 5.0, 4.0]}, "work": {"sdp C=1": [{"by_operator": ways}]}}
    sizes = (2**20, 2**22)
    seconds = {name: {str(n): [n / 1e9] for n in sizes} for name in LINES_USED[1:]}
    seconds |= {LINES_USED[0]: {str(n): [0.5 + n / 5e6] for n in sizes}}
    check = checked(measured, {"seconds": seconds}, {"seconds": {"sdp C=1": [1.0, 1.0, 1.0], "nobody": [1.0]}})
    assert check["link"] == "slow"
    assert check["steps"] == {
        "sdp C=1": {"predicted": pytest.approx(4.0), "measured": 4.0, "without link": 1.0},
    }


def test_a_check_between_nodes_by_hand() -> None:
    """Two nodes of two ranks; each rank holds all. A ring sends 3 x 3/4 of the weights over the link, for
    C = 1 twice: gradients there, weights back. Over the slower link 3 us a byte."""
    shape = NARROW | {"num_hidden_layers": 1}
    num_bytes = 4 * num_parameters(shape)
    block = {"coverage": 1.0, "regime": "forward", "strategy": "block"}
    facts = {"model": shape | {"num_parameters": 1}, "ranks": 4, "ranks_per_node": 2}
    facts |= {
        "configs": {"zero2": {}, "sdp C=1": {KEY: block}},
        "link_bytes": {"zero2": [100], "sdp C=1": [100]},
    }
    fast = facts | {"link": "8mbit", "seconds": {"zero2": [1.0], "sdp C=1": [1.0]}}
    slow = facts | {"link": "2mbit", "seconds": {"zero2": [4.0], "sdp C=1": [2.0]}}
    found = checked_between_nodes(fast, slow)
    assert found["links"] == ["8mbit", "2mbit"]
    plain, own = (found["steps"][name] for name in ("zero2", "sdp C=1"))
    assert plain["predicted"]["bytes"] == 3 * num_bytes * 3 / 4
    assert own["predicted"]["bytes"] == pytest.approx(2 * num_bytes * 3 / 4, rel=0.05)
    assert own["predicted"]["longer"] == pytest.approx(3e-6 * own["predicted"]["bytes"])
    assert (plain["measured"], own["measured"]["longer"]) == ({"bytes": 100, "longer": 3.0}, 1.0)
