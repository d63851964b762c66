"""Last acts of several ranks in one process."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from sdp_deepspeed.distributed import last_acts
from sdp_deepspeed.distributed.last_acts import LastActs


def of_ranks(size: int, said: list[str] | None = None) -> list[LastActs]:
    store: Any = dist.HashStore()
    warn = ([] if said is None else said).append
    return [LastActs(store, rank=rank, ranks=range(size), warn=warn) for rank in range(size)]


def waiting(acts: LastActs, call: int, *, since: float | None = None) -> Any:
    """As if this rank had waited for a collective for a second, and it were time for a warning."""
    since = time.monotonic() - 1 if since is None else since
    return mock.patch.object(acts, "_waiting", last_acts._Waiting(call, since, next_look=since))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "last-acts"}
