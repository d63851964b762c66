"""`sdp estimate`: the table of formulas, and what the run of a recipe takes."""

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
    assert "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 1.5 |" in printed
    assert "nodes" not in printed


def test_table_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--ranks", "64", "--coverage", "0.5", "--ranks-per-node", "8"]) == 0
    printed = capsys.readouterr().out
    assert "| between 8 nodes | nodes of a unit |" in printed
    assert "| holders on the fewest nodes | 4 | 12 | at most 0.857 |" in printed


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--dtype fp16", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 1.5 |"),
        ("--dtype fp32", "| SDP + ZeRO-2 | 2 | 0.5 | 1 | 3.5 | 3 |"),
        ("--accumulate-in-fp32", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 1.5 |"),
        ("--accumulation 3", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 3 | 3 |"),
        ("--regime backward", "| SDP + ZeRO-2 | 2 | 0.5 | 1.5 | 4 | 2.5 |"),
        ("--offload", "| SDP + ZeRO-2 | 1 | 0.5 | 1.5 | 1.5 | 1.5 |"),
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


MODEL = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 344}
MODEL |= {"num_hidden_layers": 8, "num_attention_heads": 4}
DATA = {"vocab_size": 2048, "sequence_length": 64}
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 4e-3}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000},
}
SCHEDULE = {KEY: {"schedule": [{"coverage": 0.5, "until": 0.5}, {"coverage": 1.0}]}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with a recipe."""
    monkeypatch.chdir(tmp_path)
    write(deepspeed=CONFIG | SCHEDULE)


def write(**sections: Any) -> None:
    recipe = {"model": MODEL, "data": DATA, "training": TRAINING} | sections
    Path("run.yaml").write_text(json.dumps(recipe))  # which is YAML too


def printed_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate", "--ranks", "4", "run.yaml", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_of(capsys)
    assert printed.startswith("phase 1 of 2:\n2.1M parameters on 4 ranks, 1024 tokens per step\n")
    for row in ("weights", "activations of a micro-batch", "peak, at least", "sent per step", "FLOPs per step"):
        assert f"\n  {row} " in printed
    assert "warning" not in printed


@pytest.mark.slow
def test_the_config_of_a_run_may_be_a_file_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed_of(capsys)
    Path("ds.json").write_text(json.dumps(CONFIG | SCHEDULE))
    write(deepspeed="ds.json")
    assert printed_of(capsys) == whole


def test_what_training_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Micro-steps, bf16 and activation checkpointing."""
    write(deepspeed=CONFIG)
    plain = figures(printed_of(capsys))
    write(deepspeed=CONFIG, training=TRAINING | {"bf16": True, "gradient_accumulation_steps": 3})
    printed = printed_of(capsys)
    assert "3072 tokens per step" in printed
    assert figures(printed)["weights"] == pytest.approx(plain["weights"] / 2, abs=0.02)
    write(deepspeed=CONFIG, training=TRAINING | {"gradient_checkpointing": True})
    assert figures(printed_of(capsys))["activations of a micro-batch"] < plain["activations of a micro-batch"]


def figures(printed: str) -> dict[str, float]:
    rows = re.findall(r"^  (.*?)  +(.*)$", printed, re.MULTILINE)
    return {name.strip(): float(value.split()[0]) for name, value in rows}


@pytest.mark.slow
def test_each_phase_of_a_schedule_is_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG | {"gradient_accumulation_steps": 2}
    phases = [{"coverage": 0.5, "until": 0.001}, {"coverage": 0.75, "until": 0.002}]
    phases += [{"coverage": 1.0, "stage": 2}]
    alone = [config | {KEY: {"coverage": coverage}} for coverage in (0.5, 0.75, 1.0)]
    alone[2] |= {"zero_optimization": CONFIG["zero_optimization"] | {"stage": 2}}
    texts = []
    for content in (config | {KEY: {"schedule": phases}}, *alone):
        write(deepspeed=content)
        texts.append(printed_of(capsys))
    assert len(set(texts)) == 4
    assert texts[0] == "".join(f"phase {index} of 3:\n{text}" for index, text in enumerate(texts[1:], start=1))


def test_a_run_under_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of fp32 weights and gradients, two moments; nothing of the exchange."""
    write(**{KEY: {"coverage": 0.5}})
    found = figures(printed_of(capsys))
    assert found["weights"] == found["gradients"]
    assert found["optimizer state"] == pytest.approx(2 * found["weights"], abs=0.02)
    assert "buffers of what travels, at most" not in found
    parts = ("weights", "gradients", "optimizer state", "gathered at once, at most", "activations of a micro-batch")
    assert found["peak, at least"] == pytest.approx(sum(found[name] for name in parts), abs=0.05)


def test_warnings_of_the_planner_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write(deepspeed=CONFIG | {KEY: {"holders": 1}})
    assert f"warning: {KEY}: 16 units with 1 holders" in printed_of(capsys)


def test_a_run_on_images(capsys: pytest.CaptureFixture[str]) -> None:
    resnet = {"model_type": "resnet", "layer_type": "basic", "hidden_sizes": [16, 32], "depths": [2, 2]}
    found = []
    for size in (32, 64):
        write(model=resnet, data={"size": size}, deepspeed=CONFIG | {KEY: {"coverage": 0.5}})
        printed = printed_of(capsys)
        assert "parameters on 4 ranks, 16 images per step" in printed
        found.append(figures(printed)["activations of a micro-batch"])
    assert found[1] > 3 * found[0]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {}}, "model has no model_type"),
        ({"data": {}}, "data.sequence_length: got None"),
        ({"data": 3}, "data: got 3, expected a mapping"),
        ({}, "neither the section deepspeed nor"),
        ({"deepspeed": "missing.json"}, "deepspeed: cannot read missing.json"),
        ({"deepspeed": CONFIG | {"bf16": 1}}, "bf16"),
        ({"deepspeed": CONFIG | {KEY: {"coverage": 0.4}}}, "0.4 of 4 subnetworks"),
        (SCHEDULE, "schedule: the plan cannot change"),
    ],
)
def test_mistakes(sections: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(**sections)
    assert main(["estimate", "--ranks", "4", "run.yaml"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.yaml"], "cannot read missing.yaml"),
        (["run.yaml", "--coverage", "0.25", "--offload"], "--coverage, --offload: no effect with a recipe"),
    ],
)
def test_mistakes_of_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n"])
def test_a_file_that_is_no_recipe(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(text)
    assert main(["estimate", "run.yaml"]) == 2
    assert "recipe: run.yaml" in capsys.readouterr().err
