"""Overlap: buckets leave early, in one order on all ranks, nothing is touched too soon, nothing but time changes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from tests.helpers.toy_training import Trained, by_hand, compare, run_toy, toy_of


def assert_same_bits(one: list[Trained], other: list[Trained]) -> None:
    for own, others in zip(one, other, strict=True):
        assert own.norms == others.norms
        for name, value in own.weights.items():
            assert torch.equal(value, others.weights[name]), name


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("seed", "size", "limit", "nodes"),
    [
        *[(1, 2, 7, "one"), (3, 4, 40, "one"), (5, 3, 11, "one"), (7, 4, 10_000, "one")],
        *[(1, 2, 7, "alone"), (3, 4, 40, "halves"), (7, 5, 10_000, "in turn")],
        pytest.param(5, 6, 11, "1 + 2 + 3", marks=pytest.mark.slow),
    ],
)
def test_results_are_right_and_the_same_with_overlap(
    seed: int, size: int, limit: int, nodes: str, stage: int, regime: str
) -> None:
    """Against a computation by hand, with everything arriving as late as it may; clipped, so that norms act."""
    toy = toy_of(seed, size, regime, limit, nodes, stage=stage, clip=20.0)
    found = [run_toy(replace(toy, overlap=overlap)) for overlap in (0, 2)]
    compare(toy, found[0], by_hand(toy))
    assert_same_bits(*found)
    live = [max(trained.most_live for trained in ranks) for ranks in found]
    num_buckets, num_collectives = sent_together(found[0][0])
    assert live[0] == 1
    assert min(3, num_buckets) <= live[1] <= 1 + 2 * num_collectives, "one is packed, two more are in each collective"


def sent_together(trained: Trained) -> tuple[int, int]:
    """Most buckets that are sent one after the other, and most collectives that one of them goes through."""
    sent = {what: Counter(bucket.index for bucket, *_ in amounts) for what, amounts in trained.amounts.items()}
    rounds = min(min(counts.values()) for counts in sent.values())
    there_and_back = sent.get("gradients", Counter()) + sent.get("averages", Counter())
    return max(map(len, sent.values())), max((there_and_back | sent.get("weights", Counter())).values()) // rounds


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_buckets_of_single_elements(regime: str) -> None:
    toy = toy_of(5, 3, regime, 1, num_steps=1, returning=1)
    found = run_toy(toy)
    assert len(found[0].buckets[0]) > 100
    compare(toy, found, by_hand(toy))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize(("seed", "size", "limit"), [(1, 2, 7), (3, 4, 40), (5, 3, 11)])
def test_one_order_on_all_ranks(seed: int, size: int, limit: int, missing: float, overlap: int) -> None:
    """Gradients arrive in another order on each rank, and some not at all. Buckets leave in the same order everywhere,
    each as soon as its gradients and those of all before it are there, the rest at the end of backward. (A bucket of
    which a rank holds nothing leaves with its first gradient of all.)"""
    toy = toy_of(seed, size, "forward", limit, missing=missing, overlap=overlap)
    early = 0
    for rank, trained in enumerate(run_toy(toy)):
        rounds = itertools.product(range(toy.num_steps), range(toy.num_micro))
        num_buckets = len(trained.buckets[0])
        assert [index for index, _ in trained.order] == [*range(num_buckets)] * toy.num_steps * toy.num_micro
        for number, (step, micro) in enumerate(rounds):
            arrivals = [name for name, _ in toy.gradients(rank, step, micro)]
            needed = set(first_of(arrivals, set().union(*trained.held)))
            for index, arrived in trained.order[number * num_buckets : (number + 1) * num_buckets]:
                needed |= trained.held[index]
                assert list(arrived) == shortest_start(arrivals, needed)
                early += len(arrived) < len(arrivals)
    assert early > 0, "no bucket left before the last gradient"


def first_of(arrivals: list[str], trained: set[str]) -> list[str]:
    return [name for name in arrivals if name in trained][:1]


def shortest_start(arrivals: list[str], needed: set[str]) -> list[str]:
    """The first arrivals that have all of `needed`; all arrivals if some are missing."""
    for end in range(len(arrivals) + 1):
        if needed <= set(arrivals[:end]):
            return arrivals[:end]
    return arrivals


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize(("limit", "returning"), [(12, 1000), (1000, 12), (40, 40)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_half_has_its_own_limit(stage: int, limit: int, returning: int, regime: str) -> None:
    """What any rank sends or receives in one exchange; a shard is rounded up to whole elements, for each other rank."""
    toy = toy_of(3, 4, regime, limit, stage=stage, returning=returning, num_steps=1)
    limits = {"gradients": limit, "averages": limit, "weights": returning}
    most = dict.fromkeys(limits, 0)
    for trained in run_toy(toy):
        for what, amounts in trained.amounts.items():
            for bucket, *amount in amounts:
                assert max(amount) <= limits[what] + len(bucket.segments) * (toy.layout.size - 1), (what, bucket.index)
                most[what] = max(most[what], *amount)
    expected = {"gradients"} | ({"averages"} if stage == 0 else set())
    expected |= {"weights"} if stage or regime == "backward" else set()
    assert {what for what, amount in most.items() if amount} == expected
    for what in expected:
        assert most[what] > min(limits[what], 100) // 4, f"{what}: buckets far below the limit only cost collectives"


class Late(set[str]):
    """Remembers that something was in it."""

    was_used = False

    def add(self, name: str) -> None:
        self.was_used = True
        super().add(name)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(("seed", "size", "limit"), [(4, 2, 7), (5, 2, 7), (5, 3, 11), (14, 3, 11), (7, 4, 10_000)])
def test_gradients_that_come_in_two_parts(seed: int, size: int, limit: int, overlap: int) -> None:
    """The second part may come before its bucket left, after, or when some of the parameter's buckets have left; on
    each rank otherwise, so that a rank must neither stop nor send a bucket twice in a round."""
    toy, late = toy_of(seed, size, "forward", limit, twice=0.5, overlap=overlap), []

    def observe(optimizer: SubnetworkOptimizer) -> None:
        averaging: Any = optimizer._averaging
        averaging._late = Late()
        late.append(averaging._late)

    found = run_toy(toy, observe=observe)
    compare(toy, found, by_hand(toy))
    orders = [[index for index, _ in trained.order] for trained in found]
    assert all(order == orders[0] for order in orders)
    if limit < 10_000:
        assert any(names.was_used for names in late), "no gradient was divided between two rounds"
        assert len(orders[0]) // len(found[0].buckets[0]) > toy.num_steps * toy.num_micro, "nothing came late"
