"""The study on digits: its subjects' blocks, what it goes on from, and its table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import digits as study
from benchmarks.tables.digits import digits
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.vision.compute_share import compute_share
from sdp_deepspeed.vision.shapes import full_shape


def run(subject: str, seed: int, top1: float, flops: int) -> dict[str, Any]:
    figures = {"dense_top1": top1, "dense_validation_loss": 1 - top1, "steps": flops, "flops": flops, "seconds": 60.0}
    return {"subject": subject, "seed": seed} | figures


def test_the_table() -> None:
    runs = [run("data parallelism", 0, 0.99, 100), run("data parallelism", 1, 0.97, 100), run("ours", 0, 0.98, 101)]
    text = digits({"ranks": 4, "epochs": 12.0, "runs": runs})
    assert text.startswith("4 CPU ranks, batches of 64; 12 epochs of 1437 images")
    assert "| data parallelism | 2 | 98.00 ± 1.41 (worst 97.00) | 0.020 ± 0.014 | 100 | 1.000 | 60 |" in text
    assert "| ours | 1 | 98.00 ± 0.00 (worst 98.00) | 0.020 ± 0.000 | 101 | 1.010 | 60 |" in text


def test_it_goes_on_from_its_own_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "digits.json"
    options = argparse.Namespace(output=str(path), epochs=12.0)
    begun = study._begun(options)
    assert begun["runs"] == []
    path.write_text(json.dumps(begun | {"runs": [run("ours", 0, 0.9, 1)]}))
    assert len(study._begun(options)["runs"]) == 1
    options.epochs = 13.0
    with pytest.raises(SystemExit, match="is of another study"):
        study._begun(options)


@pytest.mark.parametrize("subject", [name for name, block in study.SUBJECTS.items() if block])
def test_a_subject_costs_less_in_a_step(subject: str) -> None:
    config = {KEY: study.SUBJECTS[subject]}
    assert parse(config) is not None
    shape = full_shape(json.loads(study.MODEL.read_text()), [str(number) for number in range(10)], 8)
    share = compute_share(shape, config, num_ranks=study.NUM_RANKS, image_size=8)
    assert 0.5 <= share < 0.9
