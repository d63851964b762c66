"""Forked ranks: each is fresh, and one that fails, dies or hangs is told and takes nobody with it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.helpers.gpus import ON_THE_CPU
from tests.helpers.ranks import IMPORTED, Rank, run_ranks
from tests.helpers.training import gathered

pytestmark = pytest.mark.slow


def is_fresh(rank: Rank) -> None:
    """All is imported and nothing is done: no threads that a fork would lose, no random numbers shared. GPUs are
    hidden, and a program that sees them again (DeepSpeed's launcher sets the variable anew) stays on the CPU."""
    assert set(IMPORTED) <= set(sys.modules)
    assert len(list(Path(f"/proc/{os.getppid()}/task").iterdir())) == 1, "the server has threads"
    assert torch.get_num_threads() == 1
    assert {name: os.environ.get(name) for name in ON_THE_CPU} == ON_THE_CPU
    assert not torch.cuda.is_available()
    assert get_accelerator().device_name() == "cpu"
    seeds = gathered((torch.initial_seed(), numpy.random.random(), random.random()))
    assert all(len(set(values)) == rank.size for values in zip(*seeds, strict=True))
    assert dist.get_rank() == rank.rank == int(os.environ["RANK"])
    assert not hasattr(torch, "left_by_another_run")
    torch.left_by_another_run = True  # type: ignore[attr-defined]


def fails(rank: Rank) -> None:
    assert rank.rank == 0, "what went wrong"
    dist.barrier()


def fails_elsewhere(rank: Rank) -> None:
    assert rank.rank == 1, "another thing"
    dist.barrier()


def dies(rank: Rank) -> None:
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def ends(rank: Rank) -> None:
    os._exit(0)


def hangs(rank: Rank) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


DO_NOT_PASS = {
    fails: ["rank 1 of 2", "what went wrong"],
    fails_elsewhere: ["rank 0 of 2", "another thing"],
    dies: ["rank 0 died without a word: -9"],
    ends: ["rank 0 died without a word: 0", "rank 1 died without a word: 0"],
    hangs: ["time limit", "stack-0:", "stack-1:", "in hangs"],
}


def test_a_check_that_does_not_pass_is_told_and_those_after_it_run_in_fresh_ranks() -> None:
    checks = [is_fresh, fails, is_fresh, fails, fails_elsewhere, is_fresh, dies, is_fresh, ends, hangs, is_fresh]
    named = [(f"{number}-{check.__name__}", check) for number, check in enumerate(checks)]
    for check, why in zip(checks, run_ranks(2, named, timeout=60.0).values(), strict=True):
        words = DO_NOT_PASS.get(check)
        if words is None:
            assert why is None, why
        else:
            assert all(word in str(why) for word in words), why
