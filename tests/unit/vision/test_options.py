"""The command line of launch/train_vision.py, and how epochs become steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.vision.options import VisionOptions, parse_options, settle
from tests.helpers.image_data import write_disk

MODEL = {
    "model_type": "vit",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 4,
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 3,
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
    KEY: {"coverage": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    data = {"path": str(write_disk(folder / "images")), "image_column": "img", "label_column": "label", "image_size": 8}
    for name, content in (("model", MODEL), ("deepspeed", DEEPSPEED), ("data", data)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def parse(folder: Path, *extra: str, data: bool = True) -> VisionOptions:
    files = ["--model", str(folder / "model.json"), "--deepspeed_config", str(folder / "deepspeed.json")]
    files += ["--data", str(folder / "data.json")] if data else []
    return parse_options([*files, "--run-folder", "runs/x", *extra])


def test_epochs_become_steps(folder: Path) -> None:
    options = settle(parse(folder, "--epochs", "4", "--label-smoothing", "0.1"), num_ranks=2)
    assert (options.steps, options.label_smoothing, options.epochs) == (8, 0.1, 4), "12 images, 6 in a step"
    assert options.deepspeed_config["scheduler"]["params"]["total_num_steps"] == 8
    assert settle(parse(folder, "--steps", "5"), num_ranks=2).steps == 5
    assert settle(parse(folder, "--epochs", "0.1"), num_ranks=2).steps == 1


def test_epochs_are_refused_where_ranks_share_a_batch(folder: Path) -> None:
    options = parse(folder, "--epochs", "4")
    options.deepspeed_config["tensor_parallel"] = {"autotp_size": 2}
    with pytest.raises(ValueError, match="with tensor_parallel give --steps"):
        settle(options, num_ranks=2)


def test_equal_flops(folder: Path) -> None:
    ours = settle(parse(folder, "--epochs", "40", "--equal-flops"), num_ranks=2)
    assert ours.steps == pytest.approx(160, abs=10), "C = 1/2: twice as many, but for what all workers run"
    plain = settle(parse(folder, "--epochs", "40", "--equal-flops", "--baseline"), num_ranks=2)
    assert plain.steps == 80


@pytest.mark.parametrize(
    ("extra", "data", "words"),
    [
        ([], True, "give either --epochs or --steps"),
        (["--epochs", "1", "--steps", "2"], True, "give either --epochs or --steps"),
        (["--epochs", "0"], True, "argument --epochs: got 0, expected a number above 0"),
        (
            ["--steps", "2", "--label-smoothing", "1"],
            True,
            "argument --label-smoothing: got 1, expected 0 <= share < 1",
        ),
        (["--steps", "2", "--dataset", "cifar"], False, "argument --dataset: invalid choice: 'cifar'"),
        (["--steps", "2"], False, "--data: without dataset (cifar10, cifar100, svhn, imagenet, digits) it needs path"),
    ],
)
def test_mistakes(folder: Path, extra: list[str], data: bool, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(folder, *extra, data=data)


def test_two_data_sets(folder: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset": "svhn", "seed": 3}
    path = tmp_path / "svhn.json"
    path.write_text(json.dumps(given))
    files = ["--steps", "1", "--data", str(path)]
    assert parse(folder, *files, "--dataset", "svhn", data=False).data == given
    with pytest.raises(ValueError, match="--dataset is 'digits', dataset in --data 'svhn': give one of them"):
        parse(folder, *files, "--dataset", "digits", data=False)
