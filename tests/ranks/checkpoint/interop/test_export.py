"""Checkpoints as folders in Hugging Face format, and the command that makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from sdp_deepspeed.__main__ import main as sdp
from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from tests.helpers.dense_checkpoints import tensors_in, write_checkpoint
from tests.helpers.models import TOKENS, config, family
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, engine_of, train

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"strategy": "neuron"}),
    "llama_bf16": ("llama", {}),
    "gpt2_bf16": ("gpt2", {"strategy": "neuron"}),
    "gpt_neox": ("gpt_neox", {}),
}


def write(name: str, folder: Path, rank: Rank) -> None:
    """A checkpoint, and beside it what the engine itself exports and answers."""
    architecture, block = RUNS[name]
    settings = config(holders=1, **block)
    if name.endswith("bf16"):
        settings["bf16"] = {"enabled": True}
    engine = engine_of(settings, family(architecture))
    train(engine, num_steps=2)
    engine.save_checkpoint(str(folder / name))
    engine.save_pretrained(folder / name / "hf")
    with engine.dense(resident=True), torch.no_grad():
        logits = engine.module.eval()(input_ids=TOKENS).logits
    if rank.rank == 0:
        torch.save(logits, folder / name / "logits.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in RUNS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    return path


def loaded(path: Path) -> nn.Module:
    """As a user loads it; nothing is missing and nothing is left over."""
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("name", RUNS)
def test_exported_model_is_the_engines_dense_model(name: str, folder: Path, tmp_path: Path) -> None:
    out = export(folder / name / "global_step2", tmp_path / "out", ExportFormat(max_shard_bytes=6000))
    shards = list(out.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert all(file.stat().st_size < 6000 + 2000 or len(load_file(file)) == 1 for file in shards)
    assert_identical(tensors_in(out), tensors_in(folder / name / "hf"))
    own, engines = (json.loads((path / "config.json").read_text()) for path in (out, folder / name / "hf"))
    assert own["architectures"] == engines["architectures"]
    assert own["dtype"] == engines["dtype"] == ("bfloat16" if name.endswith("bf16") else "float32")
    with torch.no_grad():
        logits = loaded(out)(input_ids=TOKENS).logits
    assert torch.equal(logits, torch.load(folder / name / "logits.pt"))
    assert not list(tmp_path.glob(".*"))


def test_weights_in_fp32_are_the_masters(folder: Path, tmp_path: Path) -> None:
    path = folder / "llama_bf16" / "global_step2"
    exact = tensors_in(export(path, tmp_path / "fp32", ExportFormat(fp32=True)))
    trained = tensors_in(export(path, tmp_path / "bf16", ExportFormat()))
    assert [file.name for file in (tmp_path / "bf16").glob("*.safetensors*")] == ["model.safetensors"]
    assert {value.dtype for value in exact.values()} == {torch.float32}
    assert_identical({name: value.bfloat16() for name, value in exact.items()}, trained)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
    assert next(loaded(tmp_path / "fp32").parameters()).dtype == torch.float32


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdp_deepspeed", "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    done = run("export", folder / "llama", tmp_path / "out", "--dtype", "fp32", "--tokenizer", tmp_path / "tokens")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    shown = run("inspect", folder / "llama")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "format 3, step 2, written by 2 ranks",
        "neuron strategy",
        "weight: 21 tensors",
        "exp_avg_sq",
        "right",
    ):
        assert text in shown.stdout, (text, shown.stdout)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def copy_of(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_damaged_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_of(folder / "llama" / "global_step2", tmp_path / "tag")
    damage(path / "tensors_00001.safetensors")
    assert sdp(["checkpoint", "inspect", str(path)]) == 1
    assert "tensors_00001.safetensors is damaged" in capsys.readouterr().out
    assert sdp(["checkpoint", "export", str(path), str(tmp_path / "out")]) == 2
    assert_one_line(capsys.readouterr().err, "tensors_00001.safetensors is damaged")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tag"]


def assert_one_line(text: str, *words: str) -> None:
    assert text.startswith("error: ")
    assert text.count("\n") == 1, text
    assert all(word in text for word in words), text


def _mistakes(folder: Path, path: Path) -> Iterator[tuple[list[object], list[str]]]:
    good, out = folder / "llama", path / "out"
    yield ["export", path / "nowhere", out], ["no folder", "nowhere"]
    yield ["export", path, out], ["no complete checkpoint"]
    yield ["export", good, out, "--tag", "lost"], ["no folder", "lost"]
    yield ["export", good, good], ["is there already"]
    yield ["export", good, out, "--max-shard-size", "0GB"], ["0GB", "5GB or 200MB"]
    yield ["export", good, out, "--dtype", "fp8"], ["fp8"]
    yield ["export", good, out, "--tokenizer", path], ["no file of a tokenizer"]
    yield ["export", good], ["out"]
    yield ["import", good], ["import"]
    yield ["inspect", path / "nowhere"], ["no folder"]


def test_mistakes_are_told_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in _mistakes(folder, tmp_path):
        assert sdp(["checkpoint", *map(str, arguments)]) == 2, arguments
        assert_one_line(capsys.readouterr().err, *words)
        assert not list(tmp_path.iterdir()), arguments


def test_nothing_is_left_of_an_export_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("sdp_deepspeed.checkpoint.interop.export.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(folder / "llama" / "global_step2", tmp_path / "out", ExportFormat())
    assert not list(tmp_path.iterdir())


_MEASURE = """
import sys, threading, time
from pathlib import Path
import sdp_deepspeed.checkpoint.interop.export as module

def anonymous() -> int:  # what is not a mapped file, in bytes
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

peak, before = 0, anonymous()
def watch() -> None:
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
module.export(Path(sys.argv[1]), Path(sys.argv[2]), module.ExportFormat(fp32=True, max_shard_bytes=16 * 10**6))
print(peak - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_one_file(tmp_path: Path) -> None:
    """The model has 10 files of 16 MB; two at a time would be seen."""
    write_checkpoint(tmp_path, {f"weight/layer.{i}": torch.full((500, 1000), float(i)) for i in range(80)})
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "tag"), str(tmp_path / "out")]
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else freed memory stays with the process at times
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=given_back)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 10
    assert 14e6 < int(done.stdout) < 26e6, done.stdout
