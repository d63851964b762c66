"""Links by hand: the line through times, how one is used, what predictions are made of, and their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.common.links import Link, fitted, use
from benchmarks.predict_links import PRECISION, Traffic, checked, compute_seconds, exchanged, rings
from benchmarks.tables.links import (
    link_rates,
    one_way,
    predicted_beside_measured,
    predicted_links,
    seconds_to_loss,
    time_to_loss,
)
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.per_rank import Setup, estimate
from sdp_deepspeed.plan.placement import Network
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.models import llama


def test_a_collective_takes_its_latency_and_its_bytes() -> None:
    assert Link(0.5, 10.0).seconds(40, 3) == 3 * 0.5 + 4


def test_the_line_through_times() -> None:
    """Exact where they are on one; else small messages weigh as much as large ones, so that neither end is off by
    more than the other in proportion."""
    line = fitted({n: 0.25 + n / 8 for n in (1, 10, 1000)})
    assert line.latency == pytest.approx(0.25)
    assert line.bandwidth == pytest.approx(8)
    off = fitted({1: 2.0, 1000: 1000.0, 2000: 2200.0})
    assert off.seconds(1) == pytest.approx(2.0, rel=0.01)
    assert off.seconds(2000) == pytest.approx(2200.0, rel=0.1)
    assert fitted({1: 1.0, 2: 4.0}).latency == 0, "no collective ends before it begins"


def test_the_use_of_a_link_over_time() -> None:
    """Looks at 0, 1, 3, 4 and 8 seconds; the highest rate is 100 a second, so that less than 10 is nothing."""
    looks = [(0.0, 0, 0), (1.0, 100, 90), (3.0, 300, 92), (4.0, 301, 112), (8.0, 330, 112)]
    assert use(looks) == {"both": 1.0, "one": 3.0, "none": 4.0}


def test_operations_by_hand() -> None:
    """Two embeddings of 10 x 4, of which the head is used; 100 weights in layers; 2,048 tokens see each other."""
    shape = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2}
    scores = 3.5 * 4 * 2048 * 4 * 2
    tokens = 8 * 2048
    assert compute_seconds(shape, 180, 0.5) * 400e12 == pytest.approx(tokens * (0.5 * (600 + scores) + 240))


def test_rings_by_hand() -> None:
    """Four ranks send three quarters of what they reduce, and of what they gather."""
    found = rings(1000, 4, num_layers=5)
    assert {name: traffic.between for name, traffic in found.items()} == {
        "DDP": 3000.0,  # two bytes of gradients, twice
        "ZeRO-1, ZeRO-2": 4500.0,
        "ZeRO-3, FSDP2": 4500.0,
    }
    assert all(traffic.inside == traffic.between for traffic in found.values())
    assert [traffic.num_between for traffic in found.values()] == [1, 2, 15]


@pytest.mark.parametrize("coverage", [1.0, 0.5])
def test_the_exchange_sends_what_the_plan_and_the_estimate_say(coverage: float) -> None:
    """Between four nodes in all what the plan says; in one node what the estimate says of the rank with the most; and
    the padding of messages."""
    model = llama(4).to(torch.bfloat16)
    block = parse({KEY: {"coverage": coverage, "subnetworks": 8}})
    assert block is not None
    plan, _ = plan_model(model, block, 8, Network(tuple(rank // 2 for rank in range(8)), 2, 2))
    assert plan.placement is not None
    over_nodes, on_one = (exchanged(model, 8, coverage, ranks_per_node) for ranks_per_node in (2, 8))
    assert over_nodes.between * 4 == pytest.approx(plan.placement.sent_bytes, rel=0.1)
    tensors = [replace(info, group=0) for info in dense_tensors(model)]
    most = max(rank.sent_bytes for rank in estimate(plan, tensors, Setup(2, PRECISION)))
    assert on_one.inside == pytest.approx(most, rel=0.05)
    assert (on_one.between, on_one.num_between) == (0, 0)
    assert over_nodes.num_between == 2 * (over_nodes.num_between // 2) > 0, "there and back"


def test_levels_of_a_network() -> None:
    traffic = Traffic(inside=450e9, between=10.0, num_inside=0, num_between=2)
    assert traffic.levels(Link(1.0, 5.0)) == (1.0, 4.0)
    assert traffic.levels(None) == (1.0, 0.0)


def test_a_check_by_hand() -> None:
    """Without the link 1 second; two messages of 10 bytes in all at 5 a second, half a second each; what has no line (a
    message's other end) takes nothing."""
    ways = {"send": [2, 10], "recv_": [2, 0]}
    measured = {"link": "slow", "seconds": {"sdp C=1": [3.0, 5.0, 4.0]}, "work": {"sdp C=1": [{"by_operator": ways}]}}
    rates = {"lines": {"all_to_all, receives first, a rank late": {"alpha": 0.5, "beta": 5.0}}}
    rates["lines"] |= {name: {"alpha": 0.0, "beta": 1.0} for name in OTHER_LINES}
    check = checked(measured, rates, {"seconds": {"sdp C=1": [1.0, 1.0, 1.0], "nobody": [1.0]}})
    assert check == {"link": "slow", "steps": {"sdp C=1": {"predicted": 4.0, "measured": 4.0, "without link": 1.0}}}
    fast = {"ranks": 2, "seconds": {"sdp C=1": [1.0, 1.0, 1.0]}}
    assert predicted_beside_measured({"checks": [check]}, fast, measured).splitlines()[2:] == [
        "|  | without a slow link | predicted, slow | measured | ratio |",
        "| --- | --- | --- | --- | --- |",
        "| forward x block, C = 1 | 1.00 (1.00 to 1.00) | 4.00 | 4.00 (3.00 to 5.00) | 1.00 |",
    ]


def test_variants_of_the_one_way_link() -> None:
    seconds = {"zero2": [1.0, 1.0, 1.0], "forward x block C=1": [0.5, 0.5, 0.5]}
    use = {"forward x block C=1": [{"both": 0.1, "one": 0.2, "none": 0.3}]}
    facts = {"ranks": 2, "link": "1gbit", "seconds": seconds, "link_use": use, "model": {"num_parameters": 100}}
    arguments = [{"bucket": 10, "all_to_all_of_gloo": True}, {"bucket": 1000}]
    settings = ["net.ipv4.tcp_slow_start_after_idle=0", None]
    runs = [facts | {"arguments": own, "link_setting": s} for own, s in zip(arguments, settings, strict=True)]
    assert one_way(*runs).splitlines()[4:] == [
        "| gloo's all-to-all, window kept when idle | 1000 | 500 | 0.50 (0.50 to 0.50) | 100 | 200 | 300 |",
        "| receives first, one bucket | 1000 | 500 | 0.50 (0.50 to 0.50) | 100 | 200 | 300 |",
    ]


OTHER_LINES = ("all_reduce, a rank late", "all_gather, a rank late", "one way, a rank late")


def test_tables_by_hand() -> None:
    rates = {"lines": {"all_reduce": {"alpha": 0.001, "beta": 5e6}}, "link": "1gbit", "ranks": 2, "nodes": 2}
    assert link_rates(rates).splitlines()[-1] == "| all_reduce | 1.00 | 5.0 |"
    systems = {"DDP": {"compute": 0.2, "link": 0.3}, "sdp C=0.5": {"compute": 0.1, "link": 0.05}}
    facts = {"tokens": 16, "flops_per_second": 4e14, "ranks_per_node": 8, "subnetworks": 8}
    rows = [{"gpus": 64, "between": "25 GB/s", "systems": systems}]
    table = predicted_links({"facts": facts, "predicted": rows, "arguments": {"model": "1B"}}).splitlines()
    assert table[2] == "|  | DDP | C = 1/2 |"
    assert table[-1] == "| 64 GPUs, 25 GB/s | 500 (300) | 150 (100) |"


def run_of(name: str, seed: int, *points: tuple[int, float, float]) -> dict[str, Any]:
    return {"name": name, "seed": seed, "steps": points[-1][0], "curve": [list(point) for point in points]}


def test_the_time_to_a_loss_by_hand() -> None:
    """ZeRO-2 ends with 2.0 and 3.0: the goals are a hundredth higher. A loss that is never low enough has no time."""
    results = [
        run_of("zero2", 0, (1, 5.0, 2.5), (2, 10.0, 2.0)),
        run_of("zero2", 1, (1, 5.0, 3.005), (2, 10.0, 3.0)),
        run_of("sdp C=1", 0, (1, 2.0, 2.5), (2, 4.0, 2.005)),
        run_of("sdp C=1", 1, (1, 2.0, 9.0), (2, 4.0, 3.1)),
    ]
    facts = {"ranks": 4, "model": {"num_parameters": 700_000}, "sequence_length": 8, "link": "1gbit"}
    result = {"results": results, "arguments": {"micro_batch": 1}, **facts}
    assert seconds_to_loss(result, "zero2") == {0: 10.0, 1: 5.0}
    assert seconds_to_loss(result, "sdp C=1") == {0: 4.0, 1: None}
    rows = time_to_loss(result).splitlines()[2:]
    assert rows[0] == "|  | steps | dense loss at the end | seconds, 1gbit | share |"
    assert rows[2:] == [
        "| ZeRO-2 | 2 | 2.500 | 7.5 | 1.00 |",
        "| forward x block, C = 1 | 2 | 2.553 | 4.0 (1 of 2 seeds) | 0.40 |",
    ]
