"""Mistakes are told in one line, before any process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.vision.main import main
from tests.helpers.image_data import write_disk

MODEL = {"model_type": "sdp_small_image_resnet", "embedding_size": 4, "stage_sizes": [4, 8], "depths": [1, 1]}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "subnetwork_data_parallel": {"coverage": 0.5}}


def written(folder: Path, contents: dict[str, Any]) -> list[str]:
    """Options with the files that they name."""
    arguments = []
    for option, content in contents.items():
        path = folder / f"{option}.json"
        path.write_text(json.dumps(content))
        arguments += [option, str(path)]
    return arguments


def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **data: Any) -> int:
    """The exit code of rank 0 of two."""
    images = str(write_disk(tmp_path / "images"))
    given = {"path": images, "image_column": "img", "label_column": "label", "image_size": 8} | data
    files = written(tmp_path, {"--model": MODEL, "--deepspeed_config": DEEPSPEED, "--data": given})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["--run-folder", str(tmp_path / "run"), "--epochs", "1", *files])
    return int(str(end.value.code))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"label_column": "fine_label"}, "--data: label_column: no column 'fine_label', the data set has img, label"),
        ({"path": "nowhere/at/all"}, "--data: cannot open 'nowhere/at/all': "),
        ({"test_split": "validation"}, "--data: there is no split 'validation', there are train, test"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: dict[str, Any],
    words: str,
) -> None:
    assert fail(tmp_path, monkeypatch, **data) == 2
    *bars, told = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: {words}")
    assert not [line for line in bars if "error" in line or "Traceback" in line]
    assert not (tmp_path / "run").exists()


def test_it_needs_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    files = written(tmp_path, {"--model": MODEL, "--deepspeed_config": DEEPSPEED})
    with pytest.raises(SystemExit):
        main(["--dataset", "digits", "--epochs", "1", "--run-folder", str(tmp_path), *files])
    assert (
        "start this with the launcher: deepspeed --num_gpus <ranks> launch/train_vision.py" in capsys.readouterr().err
    )
