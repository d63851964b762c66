"""launch/pretrain_fsdp2.py: under torchrun without DeepSpeed, stopped and resumed, and on other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from data import Data
from tests.helpers import programs
from tests.helpers.programs import NUM_RANKS, exported, launched, run
from tests.helpers.repository import ROOT

PROGRAM = "pretrain_fsdp2.py"
RECIPE: dict[str, Any] = {
    "model": programs.LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 16},
    "data": {
        "vocab_size": 280,
        "sequence_length": 16,
        "validation_fraction": 0.3,
        "validation_blocks": 5,  # not a multiple of the ranks' batches
    },
    "training": {
        **programs.TRAINING,
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2},
    },
    "subnetwork_data_parallel": {"coverage": 0.5},
}


def command(folder: Path, output: str, steps: int, *overrides: str) -> list[str]:
    text = folder / "text.txt"
    text.write_text("\n".join(f"{number} squared is {number * number}, as anybody can see." for number in range(40)))
    return programs.command(PROGRAM, RECIPE | {"data": data_of(text)}, folder, output, steps, *overrides)


def data_of(text: Path) -> dict[str, Any]:
    return RECIPE["data"] | {"sources": [{"path": "text", "data_files": str(text)}]}


def logged(output: str) -> dict[int, dict[str, Any]]:
    """By step."""
    found: dict[int, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith('{"step"'):
            values = json.loads(line)
            found.setdefault(values["step"], {}).update(values)
    return found


COMMANDS = """
import sys
sys.modules["accelerate"] = None
from sdp_deepspeed.cli import main
sys.exit(any(main(line.split()) for line in sys.argv[1:]))
"""


def without_deepspeed(folder: Path) -> str:
    """A PYTHONPATH with which nothing can import DeepSpeed."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text('import sys\nsys.modules["deepspeed"] = None\n')
    return os.pathsep.join([str(folder / "path"), str(ROOT)])


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    program, *arguments = command(tmp_path, "stopped", 1_000_000)
    start = [*torchrun, f"launch/{program}", *arguments]
    path = without_deepspeed(tmp_path)
    with launched(start, tmp_path / "stopped.log", PYTHONPATH=path) as running:
        running.wait_for(lambda output: '{"step": 3,' in output)
        for process in running.tree():  # Ctrl-C in a terminal; torchrun passes it on to the ranks
            process.send_signal(signal.SIGINT)
        _, output = running.finish()
    assert "the same command resumes" in output
    lines = ["env", f"checkpoint inspect {tmp_path / 'stopped' / 'checkpoints'}"]
    lines += [f"{command} {arguments[0]} --ranks 2" for command in ("plan", "estimate")]
    with launched([sys.executable, "-c", COMMANDS, *lines], tmp_path / "commands.log", PYTHONPATH=path) as running:
        code, output_of_commands = running.finish()
        assert code == 0, output_of_commands
    before = logged(output)
    steps = max(before) + 2
    after = logged(run(command(tmp_path, "stopped", steps), tmp_path / "resumed.log"))
    straight = logged(run(command(tmp_path, "straight", steps), tmp_path / "straight.log"))
    assert before | after == straight
    assert list(straight) == list(range(1, steps + 1))
    weights = exported(tmp_path / "straight")
    assert exported(tmp_path / "stopped") == weights
    again = run(command(tmp_path, "stopped", steps), tmp_path / "again.log")
    assert f"the run had finished at step {steps}" in again
    assert exported(tmp_path / "stopped") == weights, "given once more"
    loss = programs.exported_loss(tmp_path / "stopped", Data(**data_of(tmp_path / "text.txt")))
    assert straight[steps]["eval_loss"] == pytest.approx(loss, abs=1e-5)  # rounding of fp32


def test_steps_have_the_same_samples_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Without subnetworks the number of ranks does not matter, through more than an epoch."""
    steps = 12
    two = logged(run(command(tmp_path, "two", steps, "sdp=off"), tmp_path / "two.log"))
    overrides = ("sdp=off", "training.per_device_train_batch_size=4")
    one = logged(run(command(tmp_path, "one", steps, *overrides), tmp_path / "one.log", size=1))
    for step in range(1, steps + 1):
        assert one[step]["loss"] == pytest.approx(two[step]["loss"], abs=1e-4), step  # rounding
