"""The examples as they stand, on two ranks: Trainer, Accelerate, Lightning, loops, and a hand-written model."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.helpers.ports import free_port
from tests.helpers.programs import run
from tests.helpers.repository import ROOT

ON_THE_CPU = str(ROOT / "tests/helpers/on_the_cpu.py")
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
]


@pytest.mark.parametrize(
    ("script", "hf"),
    [
        ("with_trainer", "hf"),
        ("with_accelerate", ""),
        ("with_deepspeed", "hf"),
        ("with_fsdp2", "hf"),
        ("with_own_model", "hf"),
    ],
    ids=lambda name: name,
)
def test_an_example_trains_and_saves_the_dense_model(script: str, hf: str, tmp_path: Path) -> None:
    program = [str(ROOT / f"launch/examples/{script}.py"), str(tmp_path), "--steps", "8"]
    output = run([ON_THE_CPU, *program] if script == "with_accelerate" else program, tmp_path / "log")
    check(output, tmp_path / hf, own_model() if script == "with_own_model" else None)
    if script in ("with_deepspeed", "with_fsdp2", "with_own_model"):
        more = run([*program[:-1], "9"], tmp_path / "more")
        assert f"resumed from {tmp_path / 'global_step8'}\n" in more
        assert {path.name for path in tmp_path.glob("global_step*")} == {"global_step8", "global_step9"}
        program[-1] = "9"
    exported = tmp_path / hf / "model.safetensors"
    before = exported.read_bytes()
    run([ON_THE_CPU, *program] if script == "with_accelerate" else program, tmp_path / "again")
    assert exported.read_bytes() == before, "a finished run, given once more"


@pytest.mark.slow  # ranks/engine/test_accelerate.py has what Accelerate does with the block
def test_accelerate_launches_the_example(tmp_path: Path) -> None:
    program = [ON_THE_CPU, str(ROOT / "launch/examples/with_accelerate.py"), str(tmp_path), "--steps", "8"]
    command = [sys.executable, *ACCELERATE, str(free_port()), *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    check(done.stdout + done.stderr, tmp_path)


@pytest.mark.slow  # lightning is not among the tests' requirements
def test_lightning_trains_resumes_and_saves_the_dense_model(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs `pip install lightning`")
    program = [str(ROOT / "tests/helpers/lightning_on_the_cpu.py"), str(ROOT / "launch/examples/with_lightning.py")]
    output = run([*program, str(tmp_path), "--steps", "8"], tmp_path / "log")
    check(output, tmp_path / "hf")
    before = (tmp_path / "hf/model.safetensors").read_bytes()
    more = run([*program, str(tmp_path), "--steps", "9"], tmp_path / "more")
    assert "Restored all states from the checkpoint" in more
    check(more, tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes() != before


def own_model() -> nn.Module:
    model: nn.Module = runpy.run_path(str(ROOT / "launch/examples/with_own_model.py"))["GPT"]()
    return model


def check(output: str, exported: Path, own: nn.Module | None = None) -> None:
    """It printed its plan, and one rank of two the loss; the folder has the model."""
    assert re.search(r"plan: \d+ units, 2 subnetworks", output)
    printed = re.findall(r"loss of the dense model: ([\d.]+)", output)
    assert len(printed) == 1, output
    held_out = torch.tensor(list(Path(re.__file__).read_bytes()))[:2048].view(-1, 64)
    with torch.no_grad():
        if own is None:
            loss = AutoModelForCausalLM.from_pretrained(exported)(input_ids=held_out, labels=held_out).loss
        else:
            own.load_state_dict(load_file(exported / "model.safetensors"))
            _, loss = own(held_out)
    assert float(printed[0]) < 5.5  # of 5.545 = ln 256 before the first step
    assert float(loss) < 5.5
