"""Processes that tokenize: their results in order, their errors, and that none of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from sdp_deepspeed.data import lifeline
from sdp_deepspeed.data.tokenize_part import Task, path_of
from sdp_deepspeed.data.workers import InThisProcess, Workers, WorkQueue, num_cores
from tests.helpers.fineweb import write_shard
from tests.helpers.own_processes import own_processes
from tests.helpers.repository import ROOT
from tests.helpers.streams import BadNetwork, SmallStream, small_stream

SECONDS = 20.0


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> SmallStream:
    return small_stream(tmp_path_factory.mktemp("stream"))


def _children() -> list[psutil.Process]:
    return own_processes("sdp_deepspeed.data.worker")


def _gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=SECONDS)[1]


def test_results_errors_and_the_end(stream: SmallStream, tmp_path: Path) -> None:
    with Workers(stream.setup, 2).running() as workers:
        processes = _children()
        assert len(processes) == 2
        for place in range(4):
            workers.submit(Task(place, stream.parts[place % 3], tmp_path))
        assert [workers.next_result(SECONDS).place for _ in range(4)] == [0, 1, 2, 3]
        broken = write_shard(tmp_path / "a.parquet", ["one"])
        part = type(stream.parts[0])(str(broken), 0, 1, 3, "text")  # type: ignore[call-arg]
        broken.write_bytes(b"nothing")
        workers.submit(Task(4, part, tmp_path))
        with pytest.raises(ValueError, match=f"{broken}: cannot be read as text documents"):
            workers.next_result(SECONDS)
    assert _gone(processes)
    here = InThisProcess(stream.setup)
    here.submit(Task(9, stream.parts[0], tmp_path))
    assert here.next_result().counts["train"].documents > 0
    assert path_of(tmp_path, 9, "train").read_bytes() == path_of(tmp_path, 0, "train").read_bytes()


def test_a_killed_process_is_told_and_not_waited_for(stream: SmallStream, tmp_path: Path) -> None:
    with Workers(stream.setup, 1).running() as workers:
        (process,) = _children()
        process.suspend()
        workers.submit(Task(0, stream.parts[0], tmp_path))
        process.kill()
        with pytest.raises(RuntimeError, match=r"a process that tokenizes ended \(exit code -9\), .*fewer workers"):
            workers.next_result(SECONDS)


def test_a_network_is_tried_again_and_not_forever(
    stream: SmallStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp_deepspeed.data.workers._SECONDS_BEFORE_TRIES", (0.0, 0.0, 0.0))
    with Workers(stream.setup, 1).running() as processes:
        kinds: list[WorkQueue] = [processes, InThisProcess(stream.setup)]
        for number, workers in enumerate(kinds):
            for fails in (3, 4):
                notes = tmp_path / f"{number}-{fails}"
                workers.submit(Task(0, BadNetwork(fails, notes), tmp_path))
                with nullcontext() if fails == 3 else pytest.raises(ConnectionError, match="no route"):
                    assert sum(count.documents for count in workers.next_result(SECONDS).counts.values()) == 1
                assert len(notes.read_text().splitlines()) == 4
                processes._pending.clear()


@pytest.mark.parametrize("module", ["worker", "background"])
@pytest.mark.parametrize("told", [b"", b"\x80"])
def test_the_end_of_the_one_that_started_it_is_no_error(
    module: str, told: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it has said what to do, as when another rank of the run has found a mistake, or in the middle of it."""
    process = lifeline.start(f"sdp_deepspeed.data.{module}")
    process.communicate(told, SECONDS)
    assert process.returncode == 0
    assert "Error" not in capfd.readouterr().err


def _wait_until_it_ignores(process: psutil.Process, number: signal.Signals) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
        if mask >> (number - 1) & 1:
            return
        time.sleep(0.05)
    pytest.fail("it does not ignore the signal")


HOLDER = """
import sys, time
from pathlib import Path
from tests.helpers.streams import EndlessPart, small_stream
from sdp_deepspeed.data.tokenize_part import Task
from sdp_deepspeed.data.workers import Workers
stream = small_stream(Path(sys.argv[1]))
with Workers(stream.setup, 2).running() as workers:
    workers.submit(Task(0, EndlessPart(), Path(sys.argv[1])))
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_none_stays_when_the_one_that_started_them_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    processes = psutil.Process(holder.pid).children()
    assert len(processes) == 2
    for process in processes:  # what a scheduler sends to all of a job; the rank may want to save first
        _wait_until_it_ignores(process, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # one of them is at work, the other waits for some
    assert all(process.is_running() for process in processes)
    holder.send_signal(number)
    holder.wait(SECONDS)
    assert _gone(processes)
    holder.stdout.close()


def test_cores_are_those_that_this_process_may_use() -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
