"""`sdp estimate`: the table of formulas, and what a run of one model and config takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.formulas import bytes_per_parameter, sent_per_parameter, table
from sdp_deepspeed.estimate.precision import Precision

BF16 = Precision.of("bf16")


def test_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "8", "--coverage", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert table(bytes_per_parameter(8, 0.5, BF16), sent_per_parameter(8, 0.5, BF16)) in printed
    assert "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 1.5 |" in printed
    assert "nodes" not in printed


def test_table_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "64", "--coverage", "0.5", "--ranks-per-node", "8"]) == 0
    printed = capsys.readouterr().out
    assert "| between 8 nodes | nodes of a unit |" in printed
    assert "| holders on the fewest nodes | 4 | 12 | at most 0.857 |" in printed


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--dtype fp16", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 1.5 |"),
        ("--dtype fp32", "| SDP + ZeRO-2 | 2 | 0.5 | 1 | 3.5 | 3 |"),
        ("--accumulate-in-fp32", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 1.5 |"),
        ("--accumulation 3", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 2.75 | 3 |"),
        ("--regime backward", "| SDP + ZeRO-2 | 2 | 0.25 | 1.5 | 3.75 | 2.5 |"),
        ("--offload", "| SDP + ZeRO-2 | 1 | 0.25 | 1.5 | 1.25 | 1.5 |"),
        ("--offload --dtype fp32", "| SDP + ZeRO-2 | 2 | 0.5 | 1.5 | 2.5 | 3 |"),
    ],
)
def test_flags_of_the_printed_table(flags: str, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *flags.split()]) == 0
    printed = capsys.readouterr().out
    assert row in printed
    assert ("SDP, stage 0" in printed) == ("--offload" not in flags), "stage 0 has nothing to offload to"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ranks 0", "--ranks: expected a whole number above 0, got '0'"),
        ("--ranks-per-node 0", "--ranks-per-node: expected a whole number above 0, got '0'"),
        ("--accumulation 0", "--accumulation: expected a whole number above 0, got '0'"),
        ("--coverage 0", "--coverage: got 0, expected a number above 0 and at most 1"),
        ("--coverage 2", "--coverage: got 2, expected a number above 0 and at most 1"),
        ("--coverage nan", "--coverage: got nan, expected a number above 0 and at most 1"),
        ("--coverage half", "--coverage: invalid float value: 'half'"),
        ("--coverage 0.1", "0.1 of 8 ranks leaves units without a holder: needs 1/8 or more"),
    ],
)
def test_impossible_arguments(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert not printed.out


MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000},
}
HALF: dict[str, Any] = {KEY: {"coverage": 0.5}}
SCHEDULE: dict[str, Any] = {KEY: {"schedule": [{"coverage": 0.5, "until": 0.5}, {"coverage": 1.0}]}}
FILES = ["--model", "model.json", "--deepspeed_config", "ds.json"]
LENGTH = ["--sequence-length", "64"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory."""
    monkeypatch.chdir(tmp_path)
    write(CONFIG | SCHEDULE)


def write(config: dict[str, Any], model: dict[str, Any] = MODEL) -> None:
    Path("model.json").write_text(json.dumps(model))
    Path("ds.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("files")
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "4", *FILES, *LENGTH, "--micro-batch-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("phase 1 of 2:\n2.1M parameters on 4 ranks, 1024 tokens per step\n")
    for row in ("weights", "activations of a micro-batch", "peak, at least", "sent per step", "FLOPs per step"):
        assert f"\n  {row} " in printed
    assert "warning" not in printed


@pytest.mark.usefixtures("files")
def test_each_phase_of_a_schedule_is_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    phases = [{"coverage": 0.5, "until": 0.001}, {"coverage": 0.75, "until": 0.002}]
    phases += [{"coverage": 1.0, "stage": 2, "train_micro_batch_size_per_gpu": 2}]
    alone = [config | {KEY: {"coverage": coverage}} for coverage in (0.5, 0.75, 1.0)]
    alone[2] |= {"zero_optimization": CONFIG["zero_optimization"] | {"stage": 2}}
    alone[2] |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    texts = []
    for content in (config | {KEY: {"schedule": phases}}, *alone):
        write(content)
        assert main(["estimate", "--ranks", "4", *FILES, *LENGTH]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 4
    assert texts[0] == "".join(f"phase {index} of 3:\n{text}" for index, text in enumerate(texts[1:], start=1))


@pytest.mark.usefixtures("files")
def test_a_run_under_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of fp32 weights and gradients, two moments; nothing of the exchange."""
    write(CONFIG | HALF)
    assert main(["estimate", "--ranks", "4", *FILES, *LENGTH, "--host", "fsdp2"]) == 0
    printed = capsys.readouterr().out
    found = {name.strip(): value.split()[0] for name, value in re.findall(r"^  (.*?)  +(.*)$", printed, re.MULTILINE)}
    assert found["weights"] == found["gradients"]
    assert float(found["optimizer state"]) == pytest.approx(2 * float(found["weights"]), abs=0.02)
    assert "buffers of what travels, at most" not in found
    whole = sum(float(found[name]) for name in ("weights", "gradients", "optimizer state"))
    parts = float(found["gathered at once, at most"]) + float(found["activations of a micro-batch"])
    assert float(found["peak, at least"]) == pytest.approx(whole + parts, abs=0.05)


@pytest.mark.usefixtures("files")
def test_warnings_of_the_planner_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write(CONFIG | {KEY: {"holders": 1}})
    assert main(["estimate", "--ranks", "4", *FILES, *LENGTH]) == 0
    assert f"warning: {KEY}: 16 units with 1 holders" in capsys.readouterr().out


@pytest.mark.usefixtures("files")
def test_a_run_on_images(capsys: pytest.CaptureFixture[str]) -> None:
    resnet = {"model_type": "resnet", "layer_type": "basic", "hidden_sizes": [16, 32], "depths": [2, 2]}
    write({"train_batch_size": 64} | HALF, resnet | {"image_size": 32})
    assert main(["estimate", "--ranks", "4", *FILES]) == 0
    assert "parameters on 4 ranks, 64 images per step" in capsys.readouterr().out
    assert main(["estimate", "--ranks", "4", *FILES, *LENGTH]) == 2
    assert "--sequence-length: the model takes images" in capsys.readouterr().err


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (FILES[:2], "give both"),
        (FILES, "--sequence-length: needed"),
        (["--host", "fsdp2"], "give both"),
        (["--gradient-checkpointing"], "give both"),
        ([*FILES, *LENGTH, "--host", "fsdp2"], f"{KEY}.schedule: the plan cannot change"),
        ([*FILES, *LENGTH, "--coverage", "0.25", "--offload"], "--coverage, --offload: no effect with"),
        (["--model", "ds.json", *FILES[2:], *LENGTH], 'no "model_type"'),
        ([*FILES, *LENGTH, "--ranks", "3"], "0.5 of 3 subnetworks"),
        ([*FILES[:3], "uneven.json", *LENGTH], "schedule[1].train_micro_batch_size_per_gpu: got 3"),
        ([*FILES[:3], "missing.json", *LENGTH], "cannot read missing.json"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    phases = [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0, "train_micro_batch_size_per_gpu": 3}]
    uneven = {"train_micro_batch_size_per_gpu": 4, KEY: {"schedule": phases}}
    Path("uneven.json").write_text(json.dumps(uneven))
    assert main(["estimate", *arguments]) == 2
    assert words in capsys.readouterr().err
