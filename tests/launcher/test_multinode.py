"""launch/multinode.sh on two hosts: network namespaces, each with an sshd; one is cut off in mid-run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.prepare import prepare
from tests.helpers.repository import ROOT
from tests.helpers.two_hosts import NAMES, Impossible, TwoHosts, two_hosts
from tests.launcher.test_pretrain import DEEPSPEED, MODEL

STEPS, SAVE_INTERVAL = 60, 10
SILENCE_LIMIT = 10  # the least that the block takes
TIME_LIMIT = 240.0  # of a start, or of an end; on an idle machine they take half a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multinode")
    data = {"source": "stdlib", "max_bytes": 300_000, "vocab_size": 300, "sequence_length": 32}
    data |= {"validation_fraction": 0.1, "validation_blocks": 5, "cache_dir": str(folder / "cache")}
    prepare(DataConfig.from_dict(data))
    block = DEEPSPEED[KEY] | {"silence_limit": SILENCE_LIMIT}
    files = {"model": MODEL, "config": DEEPSPEED | {KEY: block}, "data": data}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "hostfile").write_text("".join(f"{name} slots=2\n" for name in NAMES))
    return folder


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[TwoHosts]:
    kept = ("VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    programs = f"{folder}/hosts/bin:{Path(sys.executable).parent}"
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # Of the first that is given ssh takes the value: its connection is given up as soon as the silent ranks are.
    environment["PDSH_SSH_ARGS_APPEND"] = f"-o ServerAliveInterval={SILENCE_LIMIT // 2} -o ServerAliveCountMax=2"
    try:
        with two_hosts(folder / "hosts", environment) as hosts:
            yield hosts
    except Impossible as reason:
        pytest.skip(f"two hosts on this machine are not possible: {reason}")


class Job:
    """`launch/multinode.sh` on the first host, always the same command."""

    def __init__(self, hosts: TwoHosts, folder: Path, log: str) -> None:
        self.run = folder / "run"
        self._log = folder / log
        command = ["bash", str(ROOT / "launch/multinode.sh"), str(folder / "hostfile")]
        for option, name in (("--model", "model"), ("--deepspeed_config", "config"), ("--data", "data")):
            command += [option, str(folder / f"{name}.json")]
        command += ["--run-folder", str(self.run), "--steps", str(STEPS), "--save-interval", str(SAVE_INTERVAL)]
        with self._log.open("wb") as log_file:
            self.process = hosts.popen(0, command, stdout=log_file, stderr=subprocess.STDOUT, cwd=ROOT)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def explain(self) -> str:
        logs = sorted((self.run / "logs").glob("*.log"))
        return "\n".join([self.said()[-4000:], *(f"{log}:\n{log.read_text()[-1500:]}" for log in logs)])

    def wait_for_step(self, step: int) -> None:
        metrics, deadline = self.run / "metrics.jsonl", time.monotonic() + TIME_LIMIT
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"step {step} was not reached: {self.explain()}")
            time.sleep(0.05)

    def wait(self) -> int:
        try:
            return self.process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"time limit: {self.explain()}")


def wait_until_no_process_is_left(hosts: TwoHosts, job: Job) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while left := hosts.python_processes():
        if time.monotonic() > deadline:
            pytest.fail(f"left over: {left}: {job.explain()}")
        time.sleep(0.1)


def logs_of(job: Job) -> dict[int, str]:
    """By rank, of the newest start."""
    found = {}
    for path in sorted((job.run / "logs").glob("*_rank*.log")):
        found[int(re.findall(r"rank(\d+)", path.name)[0])] = path.read_text()
    return found


def train_steps(job: Job) -> list[int]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


@pytest.mark.namespaces
def test_a_run_whose_host_is_cut_off_ends_on_both_and_resumes(hosts: TwoHosts, folder: Path) -> None:
    job = Job(hosts, folder, "first.log")
    job.wait_for_step(2 * SAVE_INTERVAL + 2)
    hosts.set_link("down")
    assert job.wait() != 0, job.explain()
    wait_until_no_process_is_left(hosts, job)
    check_what_was_said(job)
    assert max(train_steps(job)) < STEPS
    saved = int((job.run / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert saved >= 2 * SAVE_INTERVAL

    hosts.set_link("up")
    again = Job(hosts, folder, "second.log")
    assert again.wait() == 0, again.explain()
    assert f"resuming at step {saved}: " in again.said(), again.explain()
    assert train_steps(again) == list(range(1, STEPS + 1))
    assert json.loads((again.run / "report.json").read_text())["steps"] == STEPS
    wait_until_no_process_is_left(hosts, again)


def check_what_was_said(job: Job) -> None:
    said, logs = job.said(), logs_of(job)
    for name in NAMES:
        assert re.search(rf"^{name} +ok +2 slots, \d+ cores?; clock [-+]\d", said, re.MULTILINE), said
    assert sorted(logs) == [0, 1, 2, 3], job.explain()
    for rank in (0, 1):
        assert f"error on rank {rank}: nothing was heard of rank 2, 3 for {SILENCE_LIMIT} seconds" in logs[rank]
    for rank in (2, 3):
        assert f"error on rank {rank}: rank 0's store has not answered for {SILENCE_LIMIT} seconds" in logs[rank]
    assert re.search(r"^error: the run ended with exit code \d+; what.*\n==.*\nerror on rank \d", said, re.MULTILINE), (
        said
    )


@pytest.mark.namespaces
def test_checks_name_the_host_that_cannot_be_reached(hosts: TwoHosts, folder: Path) -> None:
    hosts.set_link("down")
    try:
        command = [sys.executable, "-m", "sdp_deepspeed", "hosts", str(folder / "hostfile")]
        process = hosts.popen(0, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
        said = process.communicate(timeout=TIME_LIMIT)[0].decode()
    finally:
        hosts.set_link("up")
    assert process.returncode == 2, said
    assert re.search(r"^node-a +ok", said, re.MULTILINE), said
    assert re.search(r"^node-b +FAILED +not reachable by ssh: ", said, re.MULTILINE), said
    assert "error: 1 of 2 hosts cannot take part: node-b" in said
    assert "Traceback" not in said
