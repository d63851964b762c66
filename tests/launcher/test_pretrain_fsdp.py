"""launch/pretrain.py --host fsdp2: under torchrun without DeepSpeed, stopped, and resumed on either host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint.storage.names import COMMON
from sdp_deepspeed.checkpoint.storage.plain_pickles import read_plain
from sdp_deepspeed.config import KEY
from sdp_deepspeed.data import DataConfig, build
from tests.helpers.launched_runs import NUM_RANKS, Forked, launched, read_metrics, train_records

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 30, "warmup_num_steps": 3}},
    "zero_optimization": {"stage": 1},
    KEY: {"coverage": 0.5, "silence_limit": 60.0},
}
SAMPLES_OF_A_STEP = 2 * 2 * NUM_RANKS
ROUNDING = 1e-5  # of fp32 losses, as in tests/helpers/sharded.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch_fsdp")
    data = {"source": "stdlib", "max_bytes": 300_000, "vocab_size": 300, "sequence_length": 32}
    data |= {"validation_fraction": 0.1, "validation_blocks": 5, "cache_dir": str(folder / "cache")}
    for name, content in (("model", MODEL), ("deepspeed", DEEPSPEED), ("data", data)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text('import sys\nsys.modules["deepspeed"] = None  # no import\n')
    return folder


def finish(folder: Path, run: str, steps: int, *extra: str) -> str:
    """All steps, by ranks that are forked."""
    with Forked(folder, run, "--steps", str(steps), *extra) as running:
        codes, output = running.finish()
        assert codes == [0] * NUM_RANKS, running.explain()
    return output


def test_a_run_goes_from_host_to_host_as_if_it_had_stayed_on_one(folder: Path) -> None:
    host = ("--host", "fsdp2")
    more = ("--steps", "100000", *host)
    with launched(folder, "moved", *more, launcher="torchrun", first_on_path=folder / "path") as running:
        running.wait_for_step(folder / "moved" / "metrics.jsonl", 4)
        processes = running.tree()
        running.process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive, running.explain()
        said = running.log.read_text()
    assert "has no use for these: zero_optimization.stage" in said
    assert "starting: SDP 1/2 + FSDP2 on 2 ranks, 256 tokens per step" in said
    assert "the same command resumes" in said, running.explain()
    stopped_at = max(train_records(folder, "moved"))
    said = finish(folder, "moved", stopped_at + 2)
    assert "goes on with another layout: host 'fsdp2' -> 'deepspeed'" in said
    assert f"resuming at step {stopped_at}: SDP 1/2 + ZeRO-1" in said
    steps = stopped_at + 4
    assert f"resuming at step {stopped_at + 2}: SDP 1/2 + FSDP2" in finish(folder, "moved", steps, *host)
    finish(folder, "straight", steps)
    check_same_training(folder, "moved", "straight")
    common = read_plain(folder / "moved" / "checkpoints" / f"step_{steps:08d}" / COMMON)
    assert common["counters"]["global_samples"] == steps * SAMPLES_OF_A_STEP
    check_what_it_leaves(folder, "moved", steps)


def check_same_training(folder: Path, one: str, other: str) -> None:
    for first, second in zip(train_records(folder, one).values(), train_records(folder, other).values(), strict=True):
        assert first["learning_rate"] == second["learning_rate"]
        assert first["loss_of"] == second["loss_of"] == "subnetwork"
        assert first["loss"] == pytest.approx(second["loss"], abs=ROUNDING), first["step"]
        assert first["gradient_norm"] == pytest.approx(second["gradient_norm"], rel=1e-4), first["step"]
    losses = [read_metrics(folder, run, "evaluation")[-1]["dense_validation_loss"] for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=ROUNDING)


def check_what_it_leaves(folder: Path, run: str, steps: int) -> None:
    """Figures of every rank, and a model that Transformers alone finds the recorded loss with."""
    report = json.loads((folder / run / "report.json").read_text())
    assert (report["label"], report["steps"]) == ("SDP 1/2 + FSDP2", steps)
    assert report["plan_hash"] == json.loads((folder / run / "plan.json").read_text())["hash"]
    of_ranks = report["ranks"]
    assert len(of_ranks) == NUM_RANKS
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / run / "hf").parameters())
    assert sum(rank["weights"] for rank in of_ranks) == 4 * whole, "each element is on one rank"
    assert sum(rank["gradients"] for rank in of_ranks) == 4 * whole
    assert all(2 * rank["weights"] < rank["optimizer"] + 1 < 2.1 * rank["weights"] for rank in of_ranks), "two moments"
    assert all(rank["peak"] > 4 * rank["weights"] and rank["flops"] > 0 and rank["sent"] > 0 for rank in of_ranks)
    data = DataConfig.from_dict(json.loads((folder / "data.json").read_text()))
    validation = build(data, micro_batch=1, rank=0, world_size=1).validation
    assert validation is not None
    model = AutoModelForCausalLM.from_pretrained(folder / run / "hf")
    with torch.no_grad():
        terms = [(model(**inputs).loss.item() * weight, weight) for inputs, weight in validation]
    loss_sum, num_tokens = map(sum, zip(*terms, strict=True))
    recorded = read_metrics(folder, run, "evaluation")[-1]
    assert (recorded["step"], recorded["num_tokens"]) == (steps, num_tokens)
    assert recorded["dense_validation_loss"] == pytest.approx(loss_sum / num_tokens, abs=1e-4)
