"""`sdp estimate` for one model and config; the formulas' own tests are in unit/estimate."""

from __future__ import annotations

import json
import re
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
    assert printed.startswith("phase 1 of 2:\n2.1M parameters on 4 ranks, 1024 tokens per step\n")
    for row in ("weights", "activations of a micro-batch", "peak, at least", "sent per step", "FLOPs per step"):
        assert f"\n  {row} " in printed
    assert "warning" not in printed


def test_each_phase_of_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As runs of their own."""
    config = json.loads((ROOT / "configs/quickstart.json").read_text()) | {"gradient_accumulation_steps": 2}
    texts = []
    phases = [{"coverage": 0.5, "until": 0.001}, {"coverage": 0.75, "until": 0.002}]
    phases += [{"coverage": 1.0, "stage": 2, "train_micro_batch_size_per_gpu": 2}]
    alone = [config | {"subnetwork_data_parallel": {"coverage": coverage}} for coverage in (0.5, 0.75, 1.0)]
    alone[2] |= {"zero_optimization": config["zero_optimization"] | {"stage": 2}}
    alone[2] |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    for content in (config | {"subnetwork_data_parallel": {"schedule": phases}}, *alone):
        (tmp_path / "ds.json").write_text(json.dumps(content))
        assert main(["estimate", "--ranks", "4", *MODEL, "--deepspeed_config", str(tmp_path / "ds.json"), *LENGTH]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 4
    assert texts[0] == "".join(f"phase {index} of 3:\n{text}" for index, text in enumerate(texts[1:], start=1))


def test_a_run_under_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of fp32 weights and gradients, two moments; nothing of the exchange."""
    config = json.loads((ROOT / "configs/quickstart.json").read_text())
    config["subnetwork_data_parallel"] = {"coverage": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = ["estimate", "--ranks", "4", *MODEL, "--deepspeed_config", str(tmp_path / "ds.json"), *LENGTH]
    assert main([*command, "--host", "fsdp2"]) == 0
    printed = capsys.readouterr().out
    found = {name.strip(): value.split()[0] for name, value in re.findall(r"^  (.*?)  +(.*)$", printed, re.MULTILINE)}
    assert found["weights"] == found["gradients"]
    assert float(found["optimizer state"]) == pytest.approx(2 * float(found["weights"]), abs=0.02)
    assert float(found["gathered at once, at most"]) > 0
    assert "buffers of what travels, at most" not in found
    whole = sum(float(found[name]) for name in ("weights", "gradients", "optimizer state"))
    parts = float(found["gathered at once, at most"]) + float(found["activations of a micro-batch"])
    assert float(found["peak, at least"]) == pytest.approx(whole + parts, abs=0.05)


def test_warnings_of_the_planner_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((ROOT / "configs/quickstart.json").read_text())
    config["subnetwork_data_parallel"] = {"holders": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["estimate", "--ranks", "4", *MODEL, "--deepspeed_config", str(tmp_path / "ds.json"), *LENGTH]) == 0
    assert "warning: subnetwork_data_parallel: 16 units with 1 holders" in capsys.readouterr().out


RESNET = {"model_type": "resnet", "layer_type": "basic", "hidden_sizes": [16, 32], "depths": [2, 2], "image_size": 32}


def test_a_run_on_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resnet.json").write_text(json.dumps(RESNET))
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "subnetwork_data_parallel": {"coverage": 0.5}}')
    files = ["--model", str(tmp_path / "resnet.json"), "--deepspeed_config", str(tmp_path / "ds.json")]
    assert main(["estimate", "--ranks", "4", *files]) == 0
    assert "parameters on 4 ranks, 64 images per step" in capsys.readouterr().out
    assert main(["estimate", "--ranks", "4", *files, *LENGTH]) == 2
    assert (
        "--sequence-length: the model takes images, as large as image_size in its JSON says" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (MODEL, "give all three"),
        ([*MODEL, *CONFIG], "give all three (without the last for images), or none"),
        (["--host", "fsdp2"], "give all three"),
        ([*MODEL, *CONFIG, *LENGTH, "--host", "fsdp2"], "subnetwork_data_parallel.schedule: the plan cannot change"),
        (["--gradient-checkpointing"], "give all three"),
        (
            [*MODEL, *CONFIG, *LENGTH, "--coverage", "0.25", "--offload"],
            "--coverage, --offload: no effect with",
        ),
        (["--model", str(ROOT / "configs/quickstart.json"), *CONFIG, *LENGTH], 'no "model_type"'),
        ([*MODEL, *CONFIG, *LENGTH, "--ranks", "3"], "0.5 of 3 subnetworks"),
        ([*MODEL, "--deepspeed_config", "uneven.json", *LENGTH], "schedule[1].train_micro_batch_size_per_gpu: got 3"),
        ([*MODEL, "--deepspeed_config", "missing.json", *LENGTH], "cannot read missing.json"),
    ],
)
def test_mistakes(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    phases = [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0, "train_micro_batch_size_per_gpu": 3}]
    uneven = {"train_micro_batch_size_per_gpu": 4, "subnetwork_data_parallel": {"schedule": phases}}
    Path("uneven.json").write_text(json.dumps(uneven))
    assert main(["estimate", *arguments]) == 2
    assert words in capsys.readouterr().err
