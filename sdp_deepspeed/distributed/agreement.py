"""Outcomes that all ranks learn together, so that one rank's failure is everyone's error and nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Collective of all data-parallel ranks: takes this rank's value, returns everyone's in rank order.
Agree = Callable[[Any], list[Any]]

# Far below any process group's timeout (10 minutes with NCCL), since preparing a corpus may take hours.
_POLL_SECONDS = 20.0
_SHOWN = 5


def over_process_group(world_size: int, group: Any = None) -> Agree:
    """`Agree` over a torch.distributed group (None: the default one) that must have `world_size` ranks.

    Raises:
        ValueError: torch.distributed is not initialized, or the group has another size.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"data for {world_size} ranks needs torch.distributed: call deepspeed.init_distributed() before build(), "
            "or pass agree="
        )
    size = dist.get_world_size(group)
    if size != world_size:
        raise ValueError(
            f"the process group has {size} ranks, the data {world_size} data-parallel ranks: pass "
            "agree=over_process_group(world_size, group) with the data-parallel group"
        )

    def agree(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    return agree


class _Background:
    """Work in a thread of rank 0, while its main thread keeps meeting the others."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.error: Exception | None = None
        self._outcome: tuple[str, Any] | None = None
        # A daemon, so that Ctrl-C ends the program and not only the waiting.
        self._thread = threading.Thread(target=self._run, name="sdp-data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = ("value", self._work())
        except Exception as error:
            self.error = error
            self._outcome = _describe(error)

    def outcome(self, seconds: float) -> tuple[str, Any] | None:
        """How the work ended, or None if it still runs after `seconds`."""
        self._thread.join(seconds)
        return None if self._thread.is_alive() else self._outcome


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, ValueError):
        return "mistake", str(error)
    return "failure", f"{type(error).__name__}: {error}"


def _rebuild(rank: int, outcome: tuple[str, Any]) -> Exception:
    kind, message = outcome
    return ValueError(message) if kind == "mistake" else RuntimeError(f"rank {rank}: {message}")


def run_on_first(work: Callable[[], T], *, rank: int, agree: Agree | None, poll_seconds: float = _POLL_SECONDS) -> T:
    """Run `work` on rank 0 alone; every rank returns its result, or raises its error.

    A collective of all ranks of `agree` (None: one rank, no collective), repeated every `poll_seconds`
    so that long work meets no timeout.

    Raises:
        ValueError: rank 0's ValueError, on every rank.
        RuntimeError: any other error of rank 0, on the other ranks (rank 0 raises the original).
    """
    if agree is None:
        return work()
    background = _Background(work) if rank == 0 else None
    outcome: tuple[str, Any] | None = None
    while outcome is None:
        outcome = agree(background.outcome(poll_seconds) if background else None)[0]
    if outcome[0] == "value":
        result: T = outcome[1]
        return result
    raise (background.error if background and background.error else _rebuild(0, outcome))


def run_on_all(work: Callable[[], T], *, rank: int, agree: Agree | None) -> T:
    """Run `work` on every rank; if it fails on any, all raise. A collective of all ranks of `agree`.

    Raises:
        ValueError, RuntimeError: this rank's own error, or one that names the ranks that failed.
    """
    if agree is None:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    outcomes = agree(_describe(error) if error else None)
    if error is not None:
        raise error
    failed = [other for other, outcome in enumerate(outcomes) if outcome is not None]
    if failed:
        more = f" (+{len(failed) - _SHOWN} more)" if len(failed) > _SHOWN else ""
        kind, message = outcomes[failed[0]]
        raise _rebuild(failed[0], (kind, f"{message} [failed on ranks {failed[:_SHOWN]}{more}, not on rank {rank}]"))
    return result
