"""One rank's error is everybody's, with its class and its rank; long work of rank 0 keeps the others meeting."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from sdp_deepspeed.distributed.agreement import Among, OneRank, raise_on_all_ranks, run_on_all_ranks, run_on_rank_0
from tests.helpers.gatherers import ThreadGatherer, outcomes_of


class FolderError(RuntimeError):
    """Adds nothing, so that it travels as it is."""


def test_one_of_several_groups_gathers_among_all() -> None:
    """Two groups of two, of which the second counts its ranks the other way round."""
    positions = [(0, 0), (1, 1), (0, 1), (1, 0)]

    def work(rank: int, objects: ThreadGatherer) -> Any:
        group, own = positions[rank]
        ranks = Among(objects, group, rank=own, size=2)
        return ranks.rank, ranks.size, ranks.gather_objects({"of": rank})

    first, second = [{"of": 0}, {"of": 2}], [{"of": 3}, {"of": 1}]
    assert outcomes_of(4, work) == [(0, 2, first), (1, 2, second), (1, 2, first), (0, 2, second)]


class CodedError(ValueError):
    """Cannot be made from one string."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("wrong key"), ValueError, "wrong key"),
        (RuntimeError("broken"), RuntimeError, "broken"),
        (FolderError("no space"), FolderError, "no space"),
        (CodedError(7, "bad"), ValueError, "bad (7)"),
        (json.JSONDecodeError("no comma", "{", 1), ValueError, "no comma: line 1 column 2 (char 1)"),
        (FileNotFoundError(2, "No such file", "f"), OSError, "[Errno 2] No such file: 'f'"),
        (NotImplementedError("not this one"), RuntimeError, "not this one"),
        (KeyError("k"), RuntimeError, "KeyError: 'k'"),
        (AssertionError(), RuntimeError, "AssertionError"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(error: Exception, kind: type[Exception], text: str) -> None:
    def run(rank: int, group: ThreadGatherer) -> None:
        raise_on_all_ranks(group, error if rank == 1 else None)

    outcomes = outcomes_of(3, run)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert {str(outcome) for outcome in outcomes} == {f"{text} [on rank 1]"}
    assert outcomes[1].__cause__ is error


def test_classes_that_other_processes_could_not_import_stay_at_home() -> None:
    class Local(ValueError):
        pass

    outcomes = outcomes_of(2, lambda rank, group: raise_on_all_ranks(group, Local("here") if rank else None))
    assert [type(outcome) for outcome in outcomes] == [ValueError] * 2


def test_an_error_of_all_ranks_names_none_and_many_ranks_are_counted() -> None:
    everybody = outcomes_of(2, lambda rank, group: raise_on_all_ranks(group, ValueError(f"of {rank}")))
    assert [str(outcome) for outcome in everybody] == ["of 0", "of 0"]
    most = outcomes_of(8, lambda rank, group: raise_on_all_ranks(group, ValueError("it") if rank else None))
    assert str(most[0]) == "it [on rank 1, 2, 3, 4, 5, +2 more]"


def test_nobody_begins_the_second_work_after_a_failure_in_the_first() -> None:
    begun: list[int] = []

    def run(rank: int, group: ThreadGatherer) -> Any:
        def first() -> int:
            if rank == 1:
                raise ValueError("first")
            return 1

        return run_on_all_ranks(group, first, lambda: begun.append(rank))

    assert all(str(outcome) == "first [on rank 1]" for outcome in outcomes_of(2, run))
    assert begun == []


def test_each_rank_gets_its_own_result_of_the_last_work() -> None:
    assert outcomes_of(3, lambda rank, group: run_on_all_ranks(group, lambda: -1, lambda: rank)) == [0, 1, 2]


@pytest.mark.parametrize("poll_seconds", [None, 0.02])
def test_rank_0_works_for_all(poll_seconds: float | None) -> None:
    worked: list[int] = []

    def run(rank: int, group: ThreadGatherer) -> str:
        def work() -> str:
            worked.append(rank)
            return f"by {rank}"

        return run_on_rank_0(group, work, poll_seconds=poll_seconds)

    assert outcomes_of(3, run) == ["by 0"] * 3
    assert worked == [0]


@pytest.mark.slow
def test_long_work_meets_the_others_often_and_its_error_travels() -> None:
    gatherings: list[int] = []

    def work() -> None:
        time.sleep(0.3)
        raise FolderError("disk is full")

    def run(rank: int, group: ThreadGatherer) -> None:
        try:
            run_on_rank_0(group, work, poll_seconds=0.02)
        finally:
            gatherings.append(group.num_gatherings)

    outcomes = outcomes_of(2, run)
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(FolderError, "disk is full")] * 2
    assert min(gatherings) > 3


def test_a_thread_that_leaves_without_an_error_is_not_waited_for() -> None:
    def run(rank: int, group: ThreadGatherer) -> None:
        try:
            run_on_rank_0(group, lambda: sys.exit(3), poll_seconds=0.02)
        except SystemExit as left:
            raise RuntimeError(f"left with {left.code}") from left

    assert [str(outcome) for outcome in outcomes_of(2, run)] == ["left with 3", "SystemExit: 3"]


def test_one_rank_needs_no_process_group() -> None:
    assert run_on_rank_0(OneRank(), lambda: 1) == 1
    with pytest.raises(OSError, match="gone"):
        run_on_all_ranks(OneRank(), lambda: open("/nowhere/gone"))  # noqa: SIM115
