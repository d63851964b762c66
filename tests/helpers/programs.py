"""Programs of launch/ as tests run them: ranks without a launcher, forked with all imports done, or by a real one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers.ports import free_port
from tests.helpers.ranks import PATIENCE, forkserver_context
from tests.helpers.repository import ROOT

NUM_RANKS = 2
TIME_LIMIT = 600.0  # seconds, for what hangs
START_UP = "a launcher and its ranks until their first steps"  # runs once more at a time limit (tests/conftest.py)
# DeepSpeed looks for its own ninja on PATH.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Sections of recipes. Rates do not depend on when the run is to end.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
TRAINING: dict[str, Any] = {"lr_scheduler_type": "constant", "logging_steps": 1}
TRAINER: dict[str, Any] = TRAINING | {"disable_tqdm": True, "report_to": "none"}
DEEPSPEED: dict[str, Any] = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def command(
    program: str, recipe: Mapping[str, Any], folder: Path, output: str, steps: int, *overrides: str
) -> list[str]:
    """Of a run with this recipe until this step, in a folder inside of `folder`."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(recipe)))
    return [program, str(path), f"training.output_dir={folder / output}", f"training.max_steps={steps}", *overrides]


class Ranks:
    """Ranks of a program, forked.

    Args:
        arguments: of the command line, beginning with the program's file name in launch/.
        log: file for their output.
        size: how many.
    """

    def __init__(self, arguments: Sequence[str], log: Path, size: int = NUM_RANKS) -> None:
        log.write_text("")
        self.log, context, port = log, forkserver_context(), free_port()
        self.processes = [
            context.Process(target=_run, args=(rank, size, port, log, list(arguments))) for rank in range(size)
        ]

    def __enter__(self) -> Ranks:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        """Until their output is as wanted."""
        _wait_for(condition, self.log, lambda: all(process.is_alive() for process in self.processes))

    def finish(self) -> str:
        """Their output, once all have ended without an error. Who waits for a rank that failed has no launcher to end
        it."""
        deadline = time.monotonic() + TIME_LIMIT
        left = list(self.processes)
        while left and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in left], max(0.0, deadline - time.monotonic()))
            left = [process for process in left if process.exitcode is None]
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + PATIENCE)
        codes, output = [process.exitcode for process in self.processes], self.log.read_text()
        assert codes == [0] * len(codes), f"{codes} (None: time limit)\n{output[-8000:]}"
        return output


def run(arguments: Sequence[str], log: Path, size: int = NUM_RANKS) -> str:
    """Forked ranks from start to end; returns their output."""
    with Ranks(arguments, log, size) as ranks:
        return ranks.finish()


def refusal(arguments: Sequence[str], log: Path, size: int = NUM_RANKS) -> str:
    """The only error that forked ranks print, all of which end with exit code 2."""
    with Ranks(arguments, log, size) as ranks:
        for process in ranks.processes:
            process.join(300)
        assert [process.exitcode for process in ranks.processes] == [2] * size
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    return error


def error_of(capsys: pytest.CaptureFixture[str], work: Callable[[], object]) -> str:
    """What a program prints as it ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 2
    return capsys.readouterr().err


def ended(
    command: Sequence[object], *, code: int = 0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command that has ended with this exit code."""
    words, variables = list(map(str, command)), os.environ | environment
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def _run(rank: int, size: int, port: int, log: Path, arguments: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "PATH": PATH}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.path.insert(0, str(ROOT / "launch"))
    sys.argv = arguments
    runpy.run_path(str(ROOT / "launch" / arguments[0]), run_name="__main__")


@contextmanager
def launched(command: Sequence[str], log: Path, **environment: str) -> Iterator[Launched]:
    """A command in the repository's root, with all that it starts killed in the end."""
    variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": PATH}
    variables |= {"PYTHONPATH": str(ROOT)} | environment
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
    running = Launched(process, log)
    try:
        yield running
    finally:
        for one in running.tree():
            one.kill()
        process.wait()


class Launched:
    """A launcher with its ranks."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def tree(self) -> list[psutil.Process]:
        """The launcher and all below it."""
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        """Until the output is as wanted."""
        _wait_for(condition, self.log, lambda: self.process.poll() is None, f"{START_UP}: ")

    def finish(self) -> tuple[int, str]:
        """Exit code and output, once it has ended."""
        code = self.process.wait(TIME_LIMIT)
        return code, self.log.read_text()


def _wait_for(condition: Callable[[str], bool], log: Path, is_alive: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition(log.read_text()):
        assert is_alive(), f"it ended:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{what}time limit:\n{log.read_text()[-4000:]}"
        time.sleep(0.05)


def trainer_log(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer logged at each step until the newest checkpoint of a run."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "grad_norm" in entry]


def exported(run: Path) -> bytes:
    """The weights that a run exported."""
    return (run / "hf/model.safetensors").read_bytes()


def exported_loss(run: Path, data: Any) -> float:
    """Of the model that a run exported on all its held-out blocks, by Transformers alone.

    Args:
        data: of the program's recipe.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from data import collate, load_blocks

    model: Any = AutoModelForCausalLM.from_pretrained(run / "hf")
    held_out = load_blocks(data, 42, run).validation
    assert len(held_out) == data.validation_blocks
    with torch.no_grad():
        return float(model(**collate(held_out)).loss)
