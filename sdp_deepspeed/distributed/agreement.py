"""Outcomes that all ranks learn together: one rank's error is everybody's, so that nobody waits for a rank that left.

All three functions are collectives of the ranks of the communicator that they get.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from sdp_deepspeed.messages import listed

T = TypeVar("T")

_KINDS = (ValueError, RuntimeError, OSError)  # what callers tell apart; every other error travels as a RuntimeError


class Gatherer(Protocol):
    """What the functions here need of a communicator."""

    rank: int
    size: int

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank, in rank order."""


class OneRank:
    """A communicator of this process alone."""

    rank = 0
    size = 1

    def gather_objects(self, value: object) -> list[Any]:
        return [value]


class Among:
    """A `Gatherer` of one of several groups that gathers among all ranks, so that who fails is named as it is there.

    Args:
        all_ranks: all groups' ranks; each of them makes one and calls it.
        group: the number of this rank's group.
        rank, size: of this rank in it, and of it.
    """

    def __init__(self, all_ranks: Gatherer, group: int, *, rank: int, size: int) -> None:
        self._all_ranks, self._group = all_ranks, group
        self.rank, self.size = rank, size

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank of the group, in its order."""
        gathered = self._all_ranks.gather_objects((self._group, self.rank, value))
        own = [(rank, other) for group, rank, other in gathered if group == self._group]
        return [other for _, other in sorted(own, key=itemgetter(0))]


def raise_on_all_ranks(communicator: Gatherer, error: Exception | None) -> None:
    """Raise on every rank if any rank has an error.

    Raises:
        the first rank's error, which names the ranks that have one unless all have. Its class is kept where it is a
            plain ValueError, RuntimeError or OSError, or a subclass that adds nothing; else it is a RuntimeError.
    """
    reports = communicator.gather_objects(None if error is None else _report(error))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    kind, text = failed[min(failed)]
    if len(failed) < communicator.size:
        text = f"{text} [on rank {listed(failed)}]"
    raise kind(text) from error


def run_on_all_ranks(communicator: Gatherer, *works: Callable[[], T]) -> T:
    """Run works one after the other on every rank; an error of some is raised on all before the next begins.

    Returns:
        What the last work returns on this rank.

    Raises:
        as `raise_on_all_ranks`.
    """
    assert works, "there is nothing to run"
    for work in works:
        error: Exception | None = None
        try:
            result = work()
        except Exception as problem:  # of any kind: the others wait for this rank
            error = problem
        raise_on_all_ranks(communicator, error)
    return result


def run_on_rank_0(communicator: Gatherer, work: Callable[[], T], *, poll_seconds: float | None = None) -> T:
    """Run `work` on rank 0 alone.

    Args:
        poll_seconds: for long work: it runs in a thread while all ranks meet this often, which keeps the time limit of
            the process group away. None runs it in this thread, and the others wait in one collective.

    Returns:
        Rank 0's result on every rank; small and picklable.

    Raises:
        rank 0's error on every rank: on rank 0 itself as it was, on others as `raise_on_all_ranks`, without naming the
            rank.
    """
    outcome = _Outcome(work if communicator.rank == 0 else None, in_background=poll_seconds is not None)
    report: tuple[str, Any] | None = None
    while report is None:
        report = communicator.gather_objects(outcome.report(poll_seconds))[0]
    what, content = report
    if what == "value":
        value: T = content
        return value
    if outcome.error is not None:
        raise outcome.error
    kind, text = content
    raise kind(text)


class _Outcome:
    """How rank 0's work ended; on other ranks nothing."""

    def __init__(self, work: Callable[[], Any] | None, *, in_background: bool) -> None:
        self._work = work
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._ended: tuple[str, Any] | None = None
        self.error: BaseException | None = None

    def report(self, seconds: float | None) -> tuple[str, Any] | None:
        """("value", result) or ("error", what `_report` makes of it); None while it runs, or where there is no work."""
        if self._work is None:
            return None
        if not self._in_background:
            self._run()
            return self._ended
        if self._thread is None:  # a daemon, so that Ctrl-C ends the program and not only the waiting
            self._thread = threading.Thread(target=self._run, name="rank-0-work", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        return None if self._thread.is_alive() else self._ended

    def _run(self) -> None:
        assert self._work is not None
        # Of any kind: the others wait for this rank. A thread must not end without a word, not even by `sys.exit`.
        caught = BaseException if self._in_background else Exception
        try:
            self._ended = ("value", self._work())
        except caught as problem:
            self.error = problem
            self._ended = ("error", _report(problem))


def _report(error: BaseException) -> tuple[type[BaseException], str]:
    """An error as a class that is made from one string, and that string."""
    kind = next((known for known in _KINDS if isinstance(error, known)), None)
    if kind is None:
        return RuntimeError, f"{type(error).__name__}: {error}".removesuffix(": ")
    error_class: type[Any] = type(error)
    # Built-in subclasses inherit `__init__` from Python 3.14 on; they travel as their base under every Python.
    adds_nothing = (
        error_class.__module__ != "builtins"
        and error_class.__init__ is kind.__init__
        and error_class.__new__ is kind.__new__
    )
    return (error_class if adds_nothing and _is_importable(error_class) else kind), f"{error}"


def _is_importable(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError):
        return False
    return True
