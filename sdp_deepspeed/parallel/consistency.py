"""Raise errors on all ranks, compare their models, plans and weights, and synchronize them without waiting for a rank
that will not join."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.messages import listed
from sdp_deepspeed.parallel.groups import default_store

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask
    from sdp_deepspeed.parallel.groups import Groups
    from sdp_deepspeed.plan.plan import Plan

T = TypeVar("T")

logger = logging.getLogger("sdp_deepspeed")

PATIENCE = 30.0  # seconds that a rank waits for others before it warns
_KINDS = (ValueError, RuntimeError, OSError, AssertionError)  # types that are kept; all others become RuntimeErrors


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a small picklable object over a group with a CPU backend, in rank order."""
    if not dist.is_initialized():
        return [value]
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the first rank's error on every rank, if any rank has one; collective. The message names the ranks with an
    error unless all have one; then only the first has the paragraphs after its problem."""
    _raise_first(gather_objects(_report(error), group), error, group)


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on every rank of a group; an error on some of them is raised on all."""
    result, error = _attempt(work)
    raise_on_all_ranks(error, group)
    return result


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """As `run_on_all_ranks`, but returns the results of all ranks in rank order; they must be small and picklable."""
    result, error = _attempt(work)
    of_ranks = gather_objects((_report(error), result), group)
    _raise_first([report for report, _ in of_ranks], error, group)
    return [result for _, result in of_ranks]


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # of any kind, since other ranks wait
        return None, error


def _report(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    kind = next((known for known in _KINDS if isinstance(error, known)), None)
    return (kind.__name__, f"{error}") if kind else ("RuntimeError", f"{type(error).__name__}: {error}")


def _raise_first(
    reports: Sequence[tuple[str, str] | None], error: Exception | None, group: dist.ProcessGroup | None
) -> None:
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    first = min(failed)
    name, text = failed[first]
    if len(failed) < len(reports):
        text = f"{text} [on rank {listed(failed)}]"
    elif "\n\n" in text and len(reports) > 1 and dist.get_rank(group) != first:
        problem, _, _ = text.partition("\n\n")
        text = f"{problem} (see the error of rank {first})"
    kind = next(known for known in _KINDS if known.__name__ == name)
    # With the traceback of the error, not chained to it: its text would be printed twice.
    raise kind(text).with_traceback(None if error is None else error.__traceback__) from None


def describe_different_settings(values: Sequence[Mapping[str, str]]) -> str:
    """An error message that names the settings that differ, from the settings of each rank."""
    lines = []
    for name in sorted(set().union(*values)):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(values):
            ranks.setdefault(settings.get(name, "absent"), []).append(rank)
        if len(ranks) > 1:
            texts = [f"{value} on rank {listed(with_value)}" for value, with_value in ranks.items()]
            lines.append(f"{name} is {' and '.join(texts[:5])}")
    return (
        f"ranks have different settings: {listed(lines, separator='; ')}. Pass the same config and arguments on all "
        "ranks"
    )


def refuse_difference(what: str, facts: Mapping[int, Sequence[str]]) -> None:
    """Raise RuntimeError with the first fact in which a rank differs from the first rank."""
    first = min(facts)
    for rank, others in facts.items():
        pairs = itertools.zip_longest(facts[first], others, fillvalue="nothing")
        if differing := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise RuntimeError(
                f"{what}: {differing[1]} on rank {rank}, {differing[0]} on rank {first}; use the same model, "
                "optimizer and requires_grad on all ranks"
            )


def check_same_parameters(
    model: nn.Module, members: Collection[Sequence[int]], group: dist.ProcessGroup | None
) -> None:
    """Compare names, shapes and dtypes of parameters; collective. Run it before collectives whose sizes depend on
    these, which would otherwise crash or hang.

    Args:
        members: ranks that must have the same parameters; tensor-parallel ranks need not.

    Raises:
        RuntimeError: on all ranks.
    """
    facts = [f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in model.named_parameters()]
    sums = gather_objects(zlib.crc32("\n".join(facts).encode()), group)
    if all(len({sums[rank] for rank in ranks}) == 1 for ranks in members):
        return
    every = gather_objects(facts, group)
    for ranks in members:
        refuse_difference("model", {rank: every[rank] for rank in ranks})


def check_same_plan(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Compare the plan's hash, and the subnetwork of each rank, which the hash does not cover; collective.

    Raises:
        RuntimeError: on all ranks, naming those with a different plan.
    """
    plans = gather_objects((plan.hash, plan.subnetwork_of_rank), group)
    if different := [rank for rank, other in enumerate(plans) if other != plans[0]]:
        raise RuntimeError(
            f"rank {listed(different)} computed a different plan from rank 0; use the same model, config and versions "
            "on all ranks"
        )


def check_agreement(mask: Mask, groups: Groups) -> None:
    """Compare the slices of parameters that data-parallel ranks store, bit by bit. Slow; for `check_agreement`.

    Raises:
        RuntimeError: two ranks have different values of a slice.
    """
    sums_here = {
        piece: zlib.crc32(mask.view(piece).contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        for name in mask.pieces
        for piece in mask.stored_pieces(name)
    }
    gathered = gather_objects((groups.tensor_parallel_rank, groups.rank, sums_here), groups.control)
    global_ranks = groups.ranks[groups.tensor_parallel_rank]
    sums_of = {global_ranks[index]: sums for number, index, sums in gathered if number == groups.tensor_parallel_rank}
    for piece in dict.fromkeys(piece for sums in sums_of.values() for piece in sums):
        ranks = [rank for rank, sums in sums_of.items() if piece in sums]
        if len({sums_of[rank][piece] for rank in ranks}) > 1:
            where = "" if piece.dim is None else f" [dim {piece.dim}, {piece.start}:{piece.start + piece.length}]"
            raise RuntimeError(
                f"ranks {listed(ranks)} have different values of {piece.parameter}{where}: training has diverged"
            )


class CallBarrier:
    """Barriers for calls that all ranks must make, such as saving a checkpoint.

    If a rank has recorded that it continues training, it will not join, and a waiting rank raises an error that names
    it, long before a timeout. Ranks that have not arrived after `PATIENCE` seconds are named in a warning.
    Communication uses the store of the default process group. All ranks construct barriers in the same order.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._store: Any = default_store()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._name = f"sdp_deepspeed/barrier/{next(self._numbers)}"
        self._num_steps = self._num_calls = 0
        self._last_keys = list[str]()  # keys of calls that this rank deletes, once all ranks make a later one
        self._store.set(f"{self._name}/{self._rank}", "0 0")

    def record_step(self) -> None:
        """Record that this rank begins another step. The message to the store is not answered, so this takes about 15
        microseconds."""
        if self._size > 1:
            self._num_steps += 1
            self._store.set(f"{self._name}/{self._rank}", f"{self._num_calls} {self._num_steps}")

    def wait(self, what: str) -> None:
        """Wait for all ranks to make the call `what`.

        Raises:
            RuntimeError: a rank continues training, makes a different call, or does not arrive within the store's
                timeout.
        """
        if self._size == 1:
            return
        prefix = f"{self._name}/calls/{self._num_calls}"
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], what)
        self._store.add(f"{prefix}/{what}", 1)
        self._store.add(prefix, 1)
        self._wait_for_all(what, prefix, keys)
        self._num_calls += 1
        self._num_steps = 0
        for key in self._last_keys:
            self._store.delete_key(key)
        self._last_keys = [keys[self._rank]]
        self._last_keys += [prefix, f"{prefix}/{what}"] if self._rank == 0 else []
        if self._store.add(f"{prefix}/{what}", 0) < self._size:
            calls = dict.fromkeys(call.decode() for call in self._store.multi_get(keys))
            raise RuntimeError(f"ranks made different calls: {'; '.join(calls)}; make each call on all ranks together")

    def _wait_for_all(self, what: str, prefix: str, keys: Sequence[str]) -> None:
        begin, pause, has_warned = time.monotonic(), 0.001, False  # seconds
        longest_pause = 0.1 * max(1.0, self._size / 64)  # rank 0 serves the requests of all ranks
        while self._store.add(prefix, 0) < self._size:
            waited = time.monotonic() - begin
            if waited > self._store.timeout.total_seconds():
                raise RuntimeError(
                    f"{what}: rank {listed(self._absent(keys))} did not arrive within the process group's timeout; "
                    "call it on all ranks, or check that rank for an error or a hang"
                )
            if waited > PATIENCE and not has_warned:
                has_warned = True
                absent = self._absent(keys)
                if absent and self._rank == min(set(range(self._size)).difference(absent)):
                    logger.warning("%s: waiting for rank %s; call it on all ranks", what, listed(absent))
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)
            if pause >= 0.1 and (ahead := self._ahead()):
                self._store.delete_key(keys[self._rank])  # the others may arrive without this rank
                self._store.add(f"{prefix}/{what}", -1)
                self._store.add(prefix, -1)
                raise RuntimeError(
                    f"{what}: rank {listed(ahead)} continued training while rank {self._rank} waits; call it on all "
                    "ranks"
                )

    def _absent(self, keys: Sequence[str]) -> list[int]:
        """Ranks that have not set their key."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _ahead(self) -> list[int]:
        """Ranks that have begun more steps since the last common call than this rank."""
        keys = [f"{self._name}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return []
        counts = [tuple(map(int, value.split())) for value in self._store.multi_get(keys)]
        ahead = []
        for rank, (num_calls, num_steps) in enumerate(counts):
            if num_calls == self._num_calls and num_steps > self._num_steps:
                ahead.append(rank)
        return ahead
