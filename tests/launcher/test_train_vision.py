"""launch/train_vision.py on scikit-learn's digits: stopped and resumed, exported, and without subnetworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import load_dataset
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForImageClassification

import sdp_deepspeed.small_image_resnet  # noqa: F401  # its model type
from tests.helpers import programs
from tests.helpers.image_data import write_folders
from tests.helpers.programs import Ranks, exported, run, trainer_log

pytest.importorskip("sklearn")
RECIPE: dict[str, Any] = {
    "model": {"model_type": "sdp_small_image_resnet", "embedding_size": 4, "stage_sizes": [4, 8], "depths": [2, 2]},
    "data": {"path": "digits", "size": 8, "padding": 1},
    "training": programs.TRAINER | {"per_device_train_batch_size": 64, "learning_rate": 3e-3},  # 11 steps in an epoch
    "deepspeed": programs.DEEPSPEED | {"subnetwork_data_parallel": {"coverage": 0.5, "strategy": "neuron"}},
}


def command(folder: Path, output: str, steps: int, *overrides: str) -> list[str]:
    return programs.command("train_vision.py", RECIPE, folder, output, steps, *overrides)


@pytest.mark.slow  # test_pretrain.py stops and resumes the same Trainer
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    workers = "training.dataloader_num_workers=1"  # the launchers' signals reach them, too
    with Ranks(command(tmp_path, "stopped", 1_000_000, workers), tmp_path / "stopped.log") as ranks:
        ranks.wait_for(lambda output: output.count("'grad_norm'") >= 13)  # in the second epoch
        asked = psutil.Process(ranks.processes[1].pid)
        for process in [*asked.children(recursive=True), asked]:  # one rank is asked, all stop together
            process.terminate()
        assert "the same command resumes" in ranks.finish()
    stopped_at = len(trainer_log(tmp_path / "stopped"))
    steps = stopped_at + 2
    run(command(tmp_path, "stopped", steps), tmp_path / "resumed.log")
    # The first evaluation is the best by this metric, so this strategy would not save the last step.
    best = ["save_strategy=best", "metric_for_best_model=top1", "greater_is_better=false"]
    best += ["eval_strategy=steps", f"eval_steps={steps // 2 + 1}"]
    command_of_straight = command(tmp_path, "straight", steps, *[f"training.{setting}" for setting in best])
    run(command_of_straight, tmp_path / "straight.log")
    resumed, straight = trainer_log(tmp_path / "stopped"), trainer_log(tmp_path / "straight")
    assert len(straight) == steps
    assert resumed == straight
    weights = exported(tmp_path / "straight")
    assert exported(tmp_path / "stopped") == weights
    run(command_of_straight, tmp_path / "again.log")
    assert exported(tmp_path / "straight") == weights, "a finished run, given once more"


def test_images_of_a_folder_are_trained_and_the_export_has_the_accuracy_and_loss_that_were_measured(
    tmp_path: Path,
) -> None:
    images = write_folders(tmp_path / "images", num_train=24, num_test=16)
    overrides = [f"data.path={images}", "training.per_device_train_batch_size=6", "training.learning_rate=0.01"]
    run(command(tmp_path, "run", 4, *overrides), tmp_path / "log")
    folder = tmp_path / "run" / "hf"
    model, processor = (
        AutoModelForImageClassification.from_pretrained(folder),
        AutoImageProcessor.from_pretrained(folder),
    )
    test = load_dataset(str(images), split="test")
    with torch.no_grad():
        logits = model.eval()(**processor([*test["image"]], return_tensors="pt")).logits
    labels = torch.tensor(test["label"])
    measured = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert measured["eval_top1"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert measured["eval_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-3), "not times the ranks"
    assert model.config.id2label == dict(enumerate(test.features["label"].names))
