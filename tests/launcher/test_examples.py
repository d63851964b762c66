"""The examples as they stand: Trainer, Accelerate, Lightning, loops, a hand-written model, and the notebook."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import AutoModelForCausalLM

from tests.helpers.ports import free_port
from tests.helpers.programs import ended, exported, launched, run
from tests.helpers.repository import ROOT

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
    output = run(program, tmp_path / "log")
    check(output, tmp_path / hf, own_model() if script == "with_own_model" else None)
    if script in ("with_deepspeed", "with_fsdp2", "with_own_model"):
        more = run([*program[:-1], "9"], tmp_path / "more")
        assert f"resumed from {tmp_path / 'global_step8'}\n" in more
        assert {path.name for path in tmp_path.glob("global_step*")} == {"global_step8", "global_step9"}
        return
    weights = tmp_path / hf / "model.safetensors"
    before = weights.read_bytes()
    run(program, tmp_path / "again")
    assert weights.read_bytes() == before, "a finished run, given once more"


@pytest.mark.slow  # ranks/engine/test_accelerate.py has what Accelerate does with the block
def test_accelerate_launches_the_example(tmp_path: Path) -> None:
    program = [str(ROOT / "launch/examples/with_accelerate.py"), str(tmp_path), "--steps", "8"]
    with launched([sys.executable, *ACCELERATE, str(free_port()), *program], tmp_path / "log") as running:
        code, output = running.finish()
    assert code == 0, output
    check(output, tmp_path)


@pytest.mark.slow  # lightning is not among the tests' requirements
def test_lightning_trains_resumes_and_saves_the_dense_model(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs `pip install lightning`")
    program = [str(ROOT / "tests/helpers/lightning_on_the_cpu.py"), str(ROOT / "launch/examples/with_lightning.py")]
    output = run([*program, str(tmp_path), "--steps", "8"], tmp_path / "log")
    check(output, tmp_path / "hf")
    before = exported(tmp_path)
    more = run([*program, str(tmp_path), "--steps", "9"], tmp_path / "more")
    assert "Restored all states from the checkpoint" in more
    check(more, tmp_path / "hf")
    assert exported(tmp_path) != before


@pytest.mark.slow  # torchtitan is not among the tests' requirements
def test_torchtitan_trains_and_saves_the_dense_model(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan, installed as the example says")
    text, assets, output = Path(re.__file__).read_text(), tmp_path / "assets", tmp_path / "output"
    for folder in (assets, tmp_path / "text"):
        folder.mkdir()
    (tmp_path / "text/data.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        [text], BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    )
    tokenizer.save(str(assets / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (assets / "tokenizer_config.json").write_text(json.dumps(names))
    program = [str(ROOT / "tests/helpers/torchtitan_on_the_cpu.py"), str(ROOT / "launch/examples/with_torchtitan.py")]
    program += ["--hf_assets_path", str(assets), "--dataloader.dataset_path", str(tmp_path / "text")]
    program += ["--validator.enable", "--validator.freq", "4", "--validator.steps", "1"]
    program += ["--validator.dataloader.dataset", "c4_test"]
    program += ["--validator.dataloader.dataset_path", str(tmp_path / "text")]
    program += ["--training.steps", "4", "--dump_folder", str(output)]
    program += ["--training.seq_len", "64", "--training.local_batch_size", "2"]
    printed = run(program, tmp_path / "log")
    losses = dict(re.findall(r"validate step: +(\d).*?loss: +([\d.]+)", printed))  # the dense model's
    assert float(losses["4"]) < float(losses["1"])
    weights = load_file(output / "dense/model.safetensors")
    assert len(weights) == 6 * 7 + 3  # of layers; embeddings, norm and head
    assert all(weight.any() and weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Cell by cell, in one process beside the examples."""
    notebook = ROOT / "launch/examples/quickstart.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    command = [sys.executable, script]
    output = ended(command, cwd=notebook.parent, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)).stdout
    assert "8 units, 4 subnetworks, 2 holders each (coverage 0.5)" in output
    assert "absent" in output
    assert "loss of the dense model: " in output
    assert "197184 parameters, loss " in output.splitlines()[-1]


def own_model() -> nn.Module:
    return runpy.run_path(str(ROOT / "launch/examples/with_own_model.py"))["GPT"]()


def check(output: str, folder: Path, own: nn.Module | None = None) -> None:
    """It printed its plan, and one rank of two the loss; the folder has the model."""
    assert re.search(r"plan: \d+ units, 2 subnetworks", output)
    printed = re.findall(r"loss of the dense model: ([\d.]+)", output)
    assert len(printed) == 1, output
    held_out = torch.tensor(list(Path(re.__file__).read_bytes()))[:2048].view(-1, 64)
    with torch.no_grad():
        if own is None:
            loss = AutoModelForCausalLM.from_pretrained(folder)(input_ids=held_out, labels=held_out).loss
        else:
            own.load_state_dict(load_file(folder / "model.safetensors"))
            _, loss = own(held_out)
    assert float(printed[0]) < 5.5  # of 5.545 = ln 256 before the first step
    assert float(loss) < 5.5
