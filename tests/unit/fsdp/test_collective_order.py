"""One order of collectives: whatever each rank holds and however late it is, nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed.fsdp.collective_order import CollectiveOrder, gathered_ahead
from tests.helpers.collective_log import check_order
from tests.helpers.recorded_orders import Holders, recorded

KINDS: dict[str, dict[str, Any]] = {
    "one after the other": {},
    "into each other": {"crossed": True},
    "checkpointed": {"stretch": 1},
    "stretches": {"stretch": 2},
    "stretches of two forward passes": {"stretch": 2, "num_passes": 2},
}
NUM_SEEDS = 50  # for each kind


def random_holders(seed: int) -> Holders:
    """Of 4 to 6 units on 3 ranks, the first on all, so that each rank has one."""
    draw = random.Random(seed)
    others = [tuple(sorted(draw.sample(range(3), draw.randint(1, 2)))) for _ in range(2 * draw.randint(2, 3) - 1)]
    return [(0, 1, 2), *others]


def is_in_order(holders: Holders, **options: Any) -> bool:
    logs = recorded(holders, **options)
    try:
        check_order(logs)
    except AssertionError:
        return False
    return True


def test_what_is_next_is_gathered_ahead_where_units_run_one_after_the_other() -> None:
    assert gathered_ahead([(2 * index, 2 * index + 1) for index in range(4)]) == [False, True, True, True]
    assert gathered_ahead([]) == []


def test_units_that_run_into_each_other_are_not() -> None:
    """1 and 2 are a layer whose norms run first: begin 1, begin 2, end 1, end 2; or one inside of the other."""
    for inner in ([(2, 4), (3, 5)], [(2, 5), (3, 4)]):
        assert gathered_ahead([(0, 1), *inner, (6, 7), (8, 9)]) == [False, False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_no_rank_waits_for_ever(kind: str) -> None:
    """What FSDP2 itself issues on random holder sets, gathering ahead, has one order."""
    for seed in range(NUM_SEEDS):
        assert check_order(recorded(random_holders(seed), **KINDS[kind])), seed


def test_by_fsdp2s_own_rule_some_would() -> None:
    """Else the test above would prove nothing."""
    assert not all(is_in_order(random_holders(seed), order=lambda sharded: None) for seed in range(20))


UPWARDS = [(0, 1), (0, 1), (1,), (0,)]  # rank 0 holds units 0, 1 and 3, rank 1 holds 0, 1 and 2


def test_what_backward_runs_again_is_gathered_downwards() -> None:
    """Two layers that end in a sum are checkpointed together. On rank 0 backward comes to unit 3 and runs the stretch
    again, which gathers 0 and then 1; on rank 1 it has gathered 1 ahead with 2 before it comes to 0."""
    assert is_in_order(UPWARDS, stretch=2)
    with mock.patch.object(CollectiveOrder, "_gather_downwards", return_value=None):
        assert not is_in_order(UPWARDS, stretch=2)


@pytest.mark.parametrize("part", ["_gather_downwards", "_restart"])
def test_what_a_later_forward_pass_left_is_gathered_downwards(part: str) -> None:
    """Two forward passes before their backward passes: each runs its own stretch again."""
    assert is_in_order(UPWARDS, stretch=2, num_passes=2)
    with mock.patch.object(CollectiveOrder, part, return_value=None):
        assert not is_in_order(UPWARDS, stretch=2, num_passes=2)
