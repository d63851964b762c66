"""launch/pretrain.py started as a user starts it, or its ranks alone; its output, and what it records."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.ports import free_port
from tests.helpers.ranks import forkserver_context
from tests.helpers.repository import ROOT

NUM_RANKS = 2
TIME_LIMIT = 180.0  # seconds for anything that is waited for; a start of two ranks takes 15 on an idle machine


def command(folder: Path, run: str, *extra: str, launcher: str = "deepspeed") -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
    program = torchrun if launcher == "torchrun" else [str(Path(sys.executable).with_name(launcher)), "--num_gpus"]
    start = [*program, str(NUM_RANKS), "--master_port", str(free_port())]
    return [*start, "launch/pretrain.py", *options(folder, run), *extra]


def options(folder: Path, run: str) -> list[str]:
    files = ["--model", str(folder / "model.json"), "--data", str(folder / "data.json")]
    files += ["--deepspeed_config", str(folder / "deepspeed.json"), "--run-folder", str(folder / run)]
    return [*files, "--eval-interval", "50"]


class Running:
    """A launched program, its output and all its processes."""

    def __init__(self, arguments: list[str], log: Path, first_on_path: Path = ROOT) -> None:
        self.arguments, self.log = arguments, log
        path = os.pathsep.join([str(first_on_path), str(ROOT)])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
        # An environment that is used but not activated: DeepSpeed looks for its own ninja on PATH.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with log.open("w") as output:
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def explain(self) -> str:
        return f"{' '.join(self.arguments)}\n{self.log.read_text()[-4000:]}"

    def wait(self) -> int:
        try:
            return self.process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"time limit: {self.explain()}")

    def tree(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_step(self, metrics: Path, step: int) -> None:
        wait_for_step(self, metrics, step)


def wait_for_step(running: Running | Forked, metrics: Path, step: int) -> None:
    """Until `step` is recorded."""
    deadline = time.monotonic() + TIME_LIMIT
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if running.is_over() or time.monotonic() > deadline:
            pytest.fail(f"step {step} was not reached: {running.explain()}")
        time.sleep(0.1)


@contextmanager
def launched(
    folder: Path, run: str, *extra: str, log: str = "", launcher: str = "deepspeed", first_on_path: Path = ROOT
) -> Iterator[Running]:
    """
    Args:
        first_on_path: what Python imports before all else.
    """
    running = Running(command(folder, run, *extra, launcher=launcher), folder / f"{log or run}.log", first_on_path)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            for process in running.tree():
                process.kill()


def finish(folder: Path, run: str, *extra: str, launcher: str = "deepspeed") -> str:
    """Run to the end; returns the output. No shared memory is left behind."""
    with launched(folder, run, *extra, launcher=launcher) as running:
        assert running.wait() == 0, running.explain()
        port = running.arguments[running.arguments.index("--master_port") + 1]
        assert not list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*"))
        return running.log.read_text()


class Forked:
    """The program's ranks without a launcher, forked with all imports done: what they say, and with which codes they
    end by themselves."""

    def __init__(self, folder: Path, run: str, *extra: str, log: str = "", program: str = "pretrain.py") -> None:
        self.log = folder / f"{log or run}.log"
        self.log.write_text("")
        arguments = free_port(), self.log, program, [*options(folder, run), *extra]
        context = forkserver_context()
        self._ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(NUM_RANKS)]

    def __enter__(self) -> Forked:
        for rank in self._ranks:
            rank.start()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()

    def explain(self) -> str:
        return f"{[rank.exitcode for rank in self._ranks]}\n{self.log.read_text()[-4000:]}"

    def is_over(self) -> bool:
        return not any(rank.is_alive() for rank in self._ranks)

    def wait_for_step(self, metrics: Path, step: int) -> None:
        wait_for_step(self, metrics, step)

    def finish(self) -> tuple[list[int], str]:
        """Exit codes, and the output of all ranks."""
        deadline = time.monotonic() + TIME_LIMIT
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        assert self.is_over(), f"time limit: {self.explain()}"
        return [rank.exitcode for rank in self._ranks], self.log.read_text()


def _rank(rank: int, port: int, log: Path, program: str, arguments: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(ROOT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for its ninja
    sys.argv = [f"launch/{program}", *arguments]
    runpy.run_path(f"launch/{program}", run_name="__main__")


def read_metrics(folder: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def train_records(folder: Path, run: str) -> dict[int, dict[str, Any]]:
    records = read_metrics(folder, run, "train")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "each step once, in order"
    return {record["step"]: record for record in records}
