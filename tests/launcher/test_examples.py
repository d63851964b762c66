"""The examples as they stand: for Transformers' Trainer, for Accelerate, and over FSDP2; by launchers of two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.ports import free_port
from tests.helpers.repository import ROOT

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    "accelerate": [
        *("accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
    ],
}


@pytest.mark.parametrize(
    ("script", "launcher", "hf"),
    [
        pytest.param("with_trainer", "torchrun", "hf", marks=pytest.mark.slow),  # launch/pretrain.py is one, too
        ("with_accelerate", "accelerate", ""),
        pytest.param("with_fsdp2", "torchrun", "hf", marks=pytest.mark.slow),  # and launch/pretrain_fsdp2.py
    ],
)
def test_an_example_trains_and_saves_the_dense_model(script: str, launcher: str, hf: str, tmp_path: Path) -> None:
    helpers = [str(ROOT / "tests/helpers/on_the_cpu.py")] if script == "with_accelerate" else []
    program = [*helpers, str(ROOT / f"launch/examples/{script}.py")]
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), *program, str(tmp_path), "--steps", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "2 subnetworks, 1 holders each (coverage 0.5)" in done.stdout + done.stderr  # the plan's table
    assert ("2 holders each (coverage 1)" in done.stdout) == (script == "with_trainer"), "whose schedule ends dense"
    printed = re.findall(r"loss of the dense model: ([\d.]+)", done.stdout)
    assert len(printed) == 1, done.stdout  # by one rank of two
    model = AutoModelForCausalLM.from_pretrained(tmp_path / hf)
    held_out = torch.tensor(list(Path(re.__file__).read_bytes()))[:2048].view(-1, 64)
    with torch.no_grad():
        loss = float(model(input_ids=held_out, labels=held_out).loss)
    if script == "with_fsdp2":
        again = subprocess.run(
            [*command[:-1], "9"], capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path
        )
        assert f"goes on from {tmp_path / 'step-8'}\n" in again.stdout, again.stderr[-4000:]
        assert {path.name for path in tmp_path.glob("step-*")} == {"step-8", "step-9"}
    assert float(printed[0]) < 5.5  # of 5.545 = ln 256 before the first step
    assert loss < 5.5
