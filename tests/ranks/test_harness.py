"""Spawned ranks: each is fresh, and one that dies or hangs is told and takes nobody with it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.helpers.ranks import IMPORTED, Rank, run_ranks
from tests.helpers.training import gathered


def is_fresh(rank: Rank) -> None:
    """All is imported and nothing is done: no threads that a fork would lose, no GPU, no random numbers shared."""
    assert set(IMPORTED) <= set(sys.modules)
    assert len(list(Path(f"/proc/{os.getppid()}/task").iterdir())) == 1, "the server has threads"
    assert torch.get_num_threads() == 1
    assert not torch.cuda.is_initialized()
    seeds = gathered((torch.initial_seed(), numpy.random.random(), random.random()))
    assert all(len(set(values)) == rank.size for values in zip(*seeds, strict=True))
    assert dist.get_rank() == rank.rank == int(os.environ["RANK"])
    assert not hasattr(torch, "left_by_another_run")
    torch.left_by_another_run = True  # type: ignore[attr-defined]


def dies(rank: Rank) -> None:
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def hangs(rank: Rank) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def fails(rank: Rank) -> None:
    assert rank.rank == 0, "what went wrong"
    dist.barrier()


def outcomes(*checks: Any, timeout: float = 60) -> list[str | None]:
    return list(run_ranks(2, [(check.__name__, check) for check in checks], timeout=timeout).values())


def test_a_rank_that_dies_or_hangs_is_told_and_the_next_ones_are_fresh() -> None:
    assert outcomes(is_fresh) == [None]
    assert outcomes(dies) == ["a rank died without a word"]
    begin = time.monotonic()
    assert outcomes(hangs, timeout=2) == ["time limit"]
    assert time.monotonic() - begin < 30
    assert outcomes(is_fresh) == [None]
    failed, late = outcomes(fails, hangs)
    assert "rank 1 of 2" in str(failed)
    assert "what went wrong" in str(failed)
    assert late == "did not run to its end, because fails failed"
