"""Ranks agree on what they do, and on errors, over the control group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def gathered(value: Any, control: Any) -> list[Any]:
    """Of all ranks, in their order. Every rank calls it.

    Args:
        value: can be pickled.
        control: gloo group of all ranks; None is a single process.
    """
    if control is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(values, value, group=control)
    return values


@contextmanager
def raised_on_all_ranks(control: Any) -> Iterator[None]:
    """The block has no collective. An exception of it on one rank is raised on all of them after it: a ValueError if
    all that were raised are, else a RuntimeError; the ranks are named."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    found = None if error is None else (isinstance(error, ValueError), str(error))
    texts: dict[str, list[int]] = {}
    for rank, other in enumerate(errors := gathered(found, control)):
        if other is not None:
            texts.setdefault(other[1], []).append(rank)
    if texts:
        kind = ValueError if all(is_value for is_value, _ in filter(None, errors)) else RuntimeError
        is_everywhere = len(texts) == 1 and all(errors)
        words = [text if is_everywhere else f"rank {', '.join(map(str, r))}: {text}" for text, r in texts.items()]
        raise kind("; ".join(words)) from error


def meet(call: str, control: Any, timeout: timedelta) -> None:
    """Every rank comes, and does the same.

    Args:
        call: what this rank is about to do, with all that must be the same.

    Raises:
        RuntimeError: a rank does not come in time; it is named on those that wait.
        ValueError: ranks do different things.
    """
    if control is not None and dist.get_world_size(control) > 1:
        try:
            dist.monitored_barrier(control, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{call}: every rank must call it: {error}") from None
    calls: dict[str, list[int]] = {}
    for rank, other in enumerate(gathered(call, control)):
        calls.setdefault(other, []).append(rank)
    if len(calls) > 1:
        found = "; ".join(f"rank {', '.join(map(str, ranks))}: {other}" for other, ranks in calls.items())
        raise ValueError(f"ranks make different calls: {found}")
