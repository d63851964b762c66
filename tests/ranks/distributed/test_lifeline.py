"""Processes that miss another one end; those that only work longer than others do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.ports import free_port
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow

LIMIT = 8.0  # seconds of silence; who is named beside a silent rank has shown no sign for five of them
TIME_LIMIT = 120.0

RANK = """
import multiprocessing, sys, time
import torch.distributed as dist
from sdp_deepspeed.distributed import lifeline
from sdp_deepspeed.distributed.communicator import Communicator

lifeline.GRACE_SECONDS = 2.0
rank, size, port, limit, behavior = *map(int, sys.argv[1:4]), float(sys.argv[4]), sys.argv[5]

def run():
    owner = lambda: None
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    lifeline.watch_ranks(owner, dist, Communicator(dist), limit)
    print("watched", flush=True)
    if behavior == "waits":
        dist.barrier()
    elif behavior.startswith("works"):
        time.sleep(float(behavior.split()[1]))
    elif behavior == "exits":
        sys.exit(3)
    dist.destroy_process_group()

if behavior == "leaves, as a child":
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    sys.exit(process.exitcode)
run()
"""

Start = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Ranks that behave as told, once they watch each other."""
    started: list[subprocess.Popen[str]] = []

    def start(*behaviors: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        processes = []
        for rank, behavior in enumerate(behaviors):
            words = [str(rank), str(len(behaviors)), str(port), str(LIMIT), behavior]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, *words],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        started.extend(processes)
        for process in processes:
            assert process.stdout is not None
            assert "watched" in process.stdout.readline()
        return processes

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what the process said."""
    _, said = process.communicate(timeout=TIME_LIMIT)
    return process.returncode, said


def test_ranks_end_with_the_name_of_one_that_is_stopped(start: Start) -> None:
    """As one whose packets get lost: its connections stay open, and nothing comes."""
    waiting, working, stopped = start("waits", "works 60", "waits")
    stopped.send_signal(signal.SIGSTOP)
    for process in (waiting, working):
        code, said = end_of(process)
        assert code == 1, said
        assert "nothing was heard of rank 2 for 8 seconds" in said


def test_ranks_end_when_the_store_does_not_answer(start: Start) -> None:
    stopped, waiting = start("works 60", "waits")
    stopped.send_signal(signal.SIGSTOP)
    code, said = end_of(waiting)
    assert code == 1, said
    assert "rank 0's store has not answered for 8 seconds" in said


@pytest.mark.parametrize("first", ["leaves", "leaves, as a child"])
def test_a_rank_that_goes_on_without_the_others_ends_well(start: Start, first: str) -> None:
    for process in start(first, f"works {2 * LIMIT}", "leaves"):
        code, said = end_of(process)
        assert code == 0, said


def test_an_error_of_one_rank_is_told_to_those_that_do_not_wait_for_it(start: Start) -> None:
    working, failing = start("works 60", "exits")
    code, said = end_of(failing)
    assert code == 3, said
    code, said = end_of(working)
    assert code == 1
    assert "rank 1 failed: sys.exit(3)" in said
