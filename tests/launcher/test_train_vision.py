"""launch/train_vision.py as a user runs it: digits, stopped and resumed, and on the other host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from sdp_deepspeed.config import KEY
from sdp_deepspeed.vision.config import ImageConfig
from sdp_deepspeed.vision.splits import open_splits
from tests.helpers.launched_runs import NUM_RANKS, Forked, read_metrics, train_records

pytest.importorskip("sklearn")
# Its batch norms are estimated anew before evaluations and the export, from NUM_BATCHES of each rank.
MODEL = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [3, 3], "layer_type": "basic"}
NUM_BATCHES = 5
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 3}},
    "zero_optimization": {"stage": 1},
    KEY: {"coverage": 0.5},
}
WARMUP = (1, 2, 3)  # steps whose rates do not depend on the schedule's length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    auto = json.loads(json.dumps(DEEPSPEED).replace('"total_num_steps": 12', '"total_num_steps": "auto"'))
    files = ("model", MODEL), ("deepspeed", DEEPSPEED), ("auto", auto), ("data", {"dataset": "digits"})
    for name, content in files:
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def finish(folder: Path, run: str, *extra: str) -> str:
    extra = (*extra, "--label-smoothing", "0.1", "--batch-norm-batches", str(NUM_BATCHES))
    with Forked(folder, run, *extra, program="train_vision.py") as running:
        found, output = running.finish()
        assert found == [0] * NUM_RANKS, running.explain()
    return output


def test_digits_are_resumed_as_if_nothing_had_happened(folder: Path) -> None:
    said = finish(folder, "resumed", "--steps", "5")
    assert "starting: SDP 1/2 + ZeRO-1 on 2 ranks, 16 images per step, 1437 training images of 8 x 8, 360 for" in said
    assert f'exported: AutoModelForImageClassification.from_pretrained("{folder}/resumed/hf") loads it, with' in said
    assert "resuming at step 5: " in finish(folder, "resumed", "--steps", "9")
    said = finish(folder, "straight", "--epochs", "0.1")
    assert "step 0: dense validation loss 2." in said
    resumed, straight = train_records(folder, "resumed"), train_records(folder, "straight")
    assert len(straight) == 9, "a tenth of 1437 images, 16 in a step"
    for field in ("loss", "gradient_norm", "learning_rate", "epoch"):
        assert [r[field] for r in resumed.values()] == [r[field] for r in straight.values()], field
    assert straight[9]["images_per_second"] > 0
    weights = [(folder / run / "hf" / "model.safetensors").read_bytes() for run in ("resumed", "straight")]
    assert weights[0] == weights[1]
    assert "come from subnetworks" not in said
    check_the_exported_model(folder / "straight")
    finish(folder, "sharded", "--host", "fsdp2", "--steps", "4", "--deepspeed_config", str(folder / "auto.json"))
    losses = [train_records(folder, "sharded")[step]["loss"] for step in WARMUP]
    assert losses == pytest.approx([straight[step]["loss"] for step in WARMUP], abs=1e-5), "the other host"


def check_the_exported_model(run: Path) -> None:
    """Transformers alone finds the recorded accuracy, with the processor beside the model."""
    model = AutoModelForImageClassification.from_pretrained(run / "hf").eval()
    counts = [int(buffer) for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts == [NUM_BATCHES] * len(counts)
    processor = AutoImageProcessor.from_pretrained(run / "hf")
    test = open_splits(ImageConfig(dataset="digits").filled()).test
    pictures = [Image.fromarray(np.array(image)) for image in test.images(range(len(test)))]
    with torch.no_grad():
        logits = model(**processor(pictures, return_tensors="pt")).logits
    labels = torch.from_numpy(test.labels)
    report, last = json.loads((run / "report.json").read_text()), read_metrics(run.parent, run.name, "evaluation")[-1]
    assert last["num_images"] == 360
    assert (report["dense_top1"], report["images_per_step"]) == (last["dense_top1"], 16)
    assert last["dense_top1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item(), abs=1 / 360)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert last["dense_validation_loss"] == pytest.approx(loss, abs=1e-4)
    assert model.config.id2label[7] == "7"
