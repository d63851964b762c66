"""`sdp estimate` for one model and config; the formulas' own tests are in unit/estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from tests.helpers.repository import ROOT

MODEL = ["--model", str(ROOT / "configs/models/tiny.json")]
CONFIG = ["--deepspeed_config", str(ROOT / "configs/quickstart.json")]
LENGTH = ["--sequence-length", "64"]


def test_a_run_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "4", *MODEL, *CONFIG, *LENGTH]) == 0
    printed = capsys.readouterr().out
    assert "2.1M parameters on 4 ranks, 1024 tokens per step" in printed
    for row in ("weights", "activations of a micro-batch", "peak, at least", "sent per step", "FLOPs per step"):
        assert f"\n  {row} " in printed
    assert "warning" not in printed


def test_warnings_of_the_planner_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((ROOT / "configs/quickstart.json").read_text())
    config["subnetwork_data_parallel"] = {"holders": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["estimate", "--ranks", "4", *MODEL, "--deepspeed_config", str(tmp_path / "ds.json"), *LENGTH]) == 0
    assert "warning: subnetwork_data_parallel: 16 units with 1 holders" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (MODEL, "give all three, or none"),
        (["--gradient-checkpointing"], "give all three, or none"),
        (
            [*MODEL, *CONFIG, *LENGTH, "--coverage", "0.25", "--offload"],
            "--coverage, --offload: no effect with",
        ),
        (["--model", str(ROOT / "configs/quickstart.json"), *CONFIG, *LENGTH], 'no "model_type"'),
        ([*MODEL, *CONFIG, *LENGTH, "--ranks", "3"], "0.5 of 3 subnetworks"),
        ([*MODEL, "--deepspeed_config", "missing.json", *LENGTH], "cannot read missing.json"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments]) == 2
    assert words in capsys.readouterr().err
