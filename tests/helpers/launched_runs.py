"""launch/pretrain.py started as a user starts it, its output, and what it records."""

from __future__ import annotations

import json
import os
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
from tests.helpers.repository import ROOT

NUM_RANKS = 2
TIME_LIMIT = 180.0  # seconds for anything that is waited for; a start of two ranks takes 15 on an idle machine


def command(folder: Path, run: str, *extra: str, launcher: str = "deepspeed") -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
    program = torchrun if launcher == "torchrun" else [str(Path(sys.executable).with_name(launcher)), "--num_gpus"]
    start = [*program, str(NUM_RANKS), "--master_port", str(free_port())]
    files = ["--model", str(folder / "model.json"), "--data", str(folder / "data.json")]
    files += ["--deepspeed_config", str(folder / "deepspeed.json"), "--run-folder", str(folder / run)]
    return [*start, "launch/pretrain.py", *files, "--eval-interval", "50", *extra]


class Running:
    """A launched program, its output and all its processes."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.arguments, self.log = arguments, log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
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

    def wait_for_step(self, metrics: Path, step: int) -> None:
        """Until `step` is recorded."""
        deadline = time.monotonic() + TIME_LIMIT
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"step {step} was not reached: {self.explain()}")
            time.sleep(0.1)


@contextmanager
def launched(folder: Path, run: str, *extra: str, log: str = "", launcher: str = "deepspeed") -> Iterator[Running]:
    running = Running(command(folder, run, *extra, launcher=launcher), folder / f"{log or run}.log")
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


def read_metrics(folder: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def train_records(folder: Path, run: str) -> dict[int, dict[str, Any]]:
    records = read_metrics(folder, run, "train")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "each step once, in order"
    return {record["step"]: record for record in records}
