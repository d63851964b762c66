"""The command line `sdp`: what its commands print, and errors, each one line on stderr with exit code 2."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import sdp_deepspeed
from sdp_deepspeed.cli import main
from sdp_deepspeed.config import KEY
from sdp_deepspeed.plan.plan import Plan

MODEL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
MODEL |= {"num_hidden_layers": 4, "num_attention_heads": 4}
DATA = {"vocab_size": 512, "sequence_length": 32}
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 4e-3}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100000},
    KEY: {"coverage": 0.5},
}
SCHEDULE = CONFIG | {KEY: {"schedule": [{"coverage": 0.5, "until": 0.5}, {"coverage": 1.0}]}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with a recipe."""
    monkeypatch.chdir(tmp_path)
    write()


def write(**sections: Any) -> None:
    recipe: dict[str, Any] = {"model": MODEL, "data": DATA, "training": TRAINING}
    recipe |= {} if KEY in sections else {"deepspeed": CONFIG}
    Path("run.yaml").write_text(json.dumps(recipe | sections))  # which is YAML too


Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    return capsys.readouterr().out


def error(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2, arguments
    found = capsys.readouterr()
    assert not found.out
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1, found.err
    return found.err


def columns(text: str) -> dict[str, dict[str, float]]:
    """The first table of an estimate: by column, numbers by row."""
    lines = [re.split("  +", line.strip()) for line in text.split("phase 2")[0].splitlines()[1:]]
    heads, *rows = [line for line in lines if len(line) > 1]
    titles = [row[0].partition(", ") for row in rows]
    assert all(unit in ("MiB", "GiB", "TFLOPs", "samples") for _, _, unit in titles)
    values = {
        title: [float(cell.replace(",", "")) for cell in row[1:]]
        for (title, _, _), row in zip(titles, rows, strict=True)
    }
    return {head: {title: row[index] for title, row in values.items()} for index, head in enumerate(heads[1:])}


@pytest.mark.parametrize("words", [(), ("plan",), ("estimate",), ("env",), ("checkpoint",), ("checkpoint", "export")])
def test_help(words: tuple[str, ...], capsys: Capture) -> None:
    assert printed(capsys, *words, "--help").startswith(f"Usage: {' '.join(('sdp', *words))} ")


def test_without_arguments_and_version(capsys: Capture) -> None:
    assert printed(capsys) == printed(capsys, "--help")
    assert printed(capsys, "--version") == f"sdp_deepspeed {sdp_deepspeed.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("estimat", "Did you mean 'estimate'? (sdp --help"),
        ("--verbose", "No such option: --verbose"),
        ("checkpoint", "Missing command (sdp checkpoint --help"),
        ("estimate missing.yaml", "missing.yaml: cannot be read: No such file"),
        ("estimate .", "expected a file"),
        ("estimate run.yaml --ranks 0", "Invalid value for '--ranks'"),
        ("estimate run.yaml --fit much", "got 'much', expected a size such as 24GiB"),
        ("estimate run.yaml --fit 24", "got '24', expected a size such as 24GiB"),
        ("estimate run.yaml sdp.coverige=0.5", "did you mean 'coverage'"),
        ("estimate run.yaml sdp.coverage=0.4 --ranks 4", "0.4 of 4 subnetworks"),
        ("estimate run.yaml model.hidden_size=wide", "model: Transformers cannot build 'llama'"),
        ("estimate run.yaml data.sequence_length=0", "data.sequence_length: got 0, expected"),
        ("estimate run.yaml training.per_device_train_batch_size=x", "train_micro_batch_size_per_gpu: got 'x'"),
        ("estimate run.yaml deepspeed.zero_optimization.stage=3", "zero_optimization.stage: got 3"),
        ("estimate run.yaml deepspeed.optimizer.type=OneBitAdam", "optimizer 'OneBitAdam'"),
        ("estimate run.yaml --ranks-per-node 3", "ranks_per_node: got 3, which does not divide 8 ranks"),
        ("plan missing.json", "missing.json"),
        ("plan saved.json sdp.coverage=0.5", "a saved plan cannot be changed: remove sdp.coverage=0.5"),
        ("plan run.yaml sdp=off", f"{KEY} is missing"),
    ],
)
def test_mistakes(arguments: str, words: str, capsys: Capture) -> None:
    assert words in error(capsys, *arguments.split())


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "\0", "[" * 1000])
def test_a_file_that_is_no_recipe(text: str, capsys: Capture) -> None:
    Path("run.yaml").write_text(text)
    assert "run.yaml: " in error(capsys, "estimate", "run.yaml")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {}}, "model.model_type: missing"),
        ({"data": 3}, "section data: got 3, expected a mapping"),
        ({"deepspeed": "missing.json"}, "missing.json: cannot be read"),
        ({"deepspeed": CONFIG | {"bf16": 1}}, "deepspeed.bf16: got 1"),
        ({KEY: SCHEDULE[KEY]}, "schedule: the plan cannot change"),
        ({KEY: {"coverage": 0.5, "regime": "backward"}}, "FSDP2: "),
    ],
)
def test_mistakes_of_a_recipe(sections: dict[str, Any], words: str, capsys: Capture) -> None:
    write(**sections)
    assert words in error(capsys, "estimate", "run.yaml", "--ranks", "4")


# ---- plan -----------------------------------------------------------------------------------------------------------


def test_plan_is_printed_saved_and_drawn(capsys: Capture) -> None:
    shown = printed(capsys, "plan", "run.yaml", "--ranks", "4", "--save", "plan.json", "--plot", "plan.png")
    table = Plan.load("plan.json")
    assert table.num_ranks == 4
    for unit, holders in zip(table.units, table.holders, strict=True):
        assert re.search(rf"{re.escape(unit.name)} +{''.join('.#'[k in holders] for k in range(4))}\n", shown)
    assert re.search(rf"\d times the mean bytes\n  spectral gap 0\.\d+\n  hash {table.hash[:16]}", shown)
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    assert table.hash[:16] in printed(capsys, "plan", "plan.json")


def test_plan_takes_overrides_and_shows_warnings(capsys: Capture) -> None:
    shown = printed(capsys, "plan", "run.yaml", "sdp={holders: 1}", "--ranks", "4")
    assert "1 holders each" in shown
    assert "warning: " in shown


def test_the_plan_of_a_config(capsys: Capture, tmp_path: Path) -> None:
    """Without a recipe or weights; its branches are printed, too."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3}
    LlamaConfig(vocab_size=61, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path)
    shown = printed(capsys, "plan", "--model", str(tmp_path), "sdp.strategy=neuron", "sdp.holders=1", "--ranks", "2")
    assert "3 x model.layers.*.attention (4 heads): input_layernorm, self_attn" in shown
    assert "3 x model.layers.*.mlp (24 neurons): post_attention_layernorm, mlp" in shown
    assert "model.layers.2.mlp.group_1" in shown
    assert "1 holders each (coverage 0.5)" in shown
    shown = printed(capsys, "plan", "--model", str(tmp_path / "config.json"), "--ranks", "2")
    assert "strategy block, 2 ranks" in shown


def test_a_config_that_is_not_there(capsys: Capture, tmp_path: Path) -> None:
    assert main(["plan", "--model", str(tmp_path / "none")]) == 2
    assert f"error: --model {tmp_path / 'none'}: " in capsys.readouterr().err


def test_the_hub_is_asked_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no network")

    monkeypatch.setattr("sdp_deepspeed.estimate.run.get_hf_file_metadata", fail)
    assert main(["plan", "--model", "some/typo"]) == 2
    assert "--model some/typo: expected a folder or file" in capsys.readouterr().err
    assert len(asked) == 1


# ---- estimate -------------------------------------------------------------------------------------------------------


def test_estimate_stands_beside_the_others(capsys: Capture) -> None:
    """The DeepSpeed config may be a file."""
    whole = printed(capsys, "estimate", "run.yaml", "--ranks", "4")
    found = columns(whole)
    assert [*found] == ["SDP", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
    sdp, dense = found["SDP"], found["ZeRO-1"]
    for row in ("weights", "gradients", "activations", "peak", "sent per step", "compute per step"):
        assert 0 < sdp[row] < dense[row], row
    assert found["ZeRO-2"]["gradients"] < dense["gradients"] / 3
    assert found["ZeRO-3"]["weights"] == pytest.approx(dense["weights"] / 4, abs=0.01)
    Path("ds.json").write_text(json.dumps(CONFIG))
    write(deepspeed="ds.json")
    assert printed(capsys, "estimate", "run.yaml", "--ranks", "4") == whole


def test_estimate_reads_what_training_says(capsys: Capture) -> None:
    """Micro-steps, bf16 and activation checkpointing."""
    plain = columns(printed(capsys, "estimate", "run.yaml"))["SDP"]
    shown = printed(capsys, "estimate", "run.yaml", "training.bf16=true", "training.gradient_accumulation_steps=3")
    assert "3,072 tokens per step" in shown
    assert columns(shown)["SDP"]["weights"] == pytest.approx(plain["weights"] / 2, abs=0.02)
    shown = printed(capsys, "estimate", "run.yaml", "training.gradient_checkpointing=true")
    assert columns(shown)["SDP"]["activations"] < plain["activations"]
    assert "SDP" not in columns(printed(capsys, "estimate", "run.yaml", "sdp=off"))


def test_estimate_shows_bytes_between_nodes(capsys: Capture) -> None:
    layout = ("--ranks", "8", "--ranks-per-node", "4")
    found = columns(printed(capsys, "estimate", "run.yaml", "sdp={coverage: 1.0, subnetworks: 2}", *layout))
    for column in (found["SDP"], found["ZeRO-1"]):  # a ring of all ranks leaves each node once
        assert column["out of its node per step"] == column["sent per step"]
    one = columns(printed(capsys, "estimate", "run.yaml", "--ranks-per-node", "8"))
    assert {column["out of its node per step"] for column in one.values()} == {0}
    write(**{KEY: {"coverage": 0.5}})
    fsdp2 = columns(printed(capsys, "estimate", "run.yaml", "--ranks", "4", "--ranks-per-node", "1"))["SDP"]
    assert fsdp2["out of its node per step"] == fsdp2["sent per step"]


def test_each_phase_of_a_schedule_is_estimated(capsys: Capture) -> None:
    write(deepspeed=SCHEDULE)
    first, second = printed(capsys, "estimate", "run.yaml", "--ranks", "4").split("phase 2 of 2: ")
    assert first.startswith("phase 1 of 2: ")
    write()
    alone = printed(capsys, "estimate", "run.yaml", "sdp.coverage=1.0", "--ranks", "4")
    assert columns("\n" + second.partition("\n")[2])["SDP"] == columns(alone)["SDP"]


def test_fit_finds_the_largest_micro_batch(capsys: Capture) -> None:
    arguments = ("estimate", "run.yaml", "--ranks", "4", "--fit", "16MiB")
    shown = printed(capsys, *arguments)
    assert "fits in 16MiB: yes, SDP with coverage 0.5 and a micro-batch of 4 samples takes up to " in shown
    found = columns(shown)
    rows = int(found["SDP"]["largest micro-batch"])
    assert rows > found["ZeRO-1"]["largest micro-batch"] >= 0

    def peak(size: int) -> float:
        shown = printed(capsys, *arguments[:4], f"training.per_device_train_batch_size={size}")
        return columns(shown)["SDP"]["peak"]

    assert peak(rows) <= 16 < peak(rows + 1) + 0.02
    shown = printed(capsys, *arguments[:5], "1MiB", code=1)
    assert columns(shown)["SDP"]["largest micro-batch"] == 0
    assert "fits in 1MiB: no, SDP" in shown
    assert "; none fits" in shown
    stage = ("sdp=off", "deepspeed.zero_optimization.stage=2")  # the recipe itself decides, not the first column
    peaks = {name: column["peak"] for name, column in columns(printed(capsys, *arguments[:4], *stage)).items()}
    between = f"{(peaks['ZeRO-0'] + peaks['ZeRO-2']) / 2:.2f}MiB"
    assert f"fits in {between}: yes, ZeRO-2 and a" in printed(capsys, *arguments[:4], *stage, "--fit", between)


def test_estimate_of_images(capsys: Capture) -> None:
    resnet = {"model_type": "resnet", "layer_type": "basic", "hidden_sizes": [16, 32], "depths": [2, 2]}
    found = []
    for size in (32, 64):
        write(model=resnet, data={"size": size})
        shown = printed(capsys, "estimate", "run.yaml", "--ranks", "4")
        assert "4 ranks, 16 images per step" in shown
        found.append(columns(shown)["SDP"]["activations"])
    assert found[1] > 3 * found[0]


def test_env_names_versions(capsys: Capture) -> None:
    shown = printed(capsys, "env")
    assert f"sdp_deepspeed  {sdp_deepspeed.__version__}\n" in shown
    assert re.search(rf"^torch +{re.escape(version('torch'))}$", shown, re.MULTILINE)


def test_env_names_locks(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a killed run leaves where DeepSpeed compiles its Adam."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam/lock"
    lock.parent.mkdir()
    lock.touch()
    assert f"cpu_adam: no process here has {lock} open" in printed(capsys, "env")
    with lock.open():
        assert f"cpu_adam: process {os.getpid()} compiles it" in printed(capsys, "env")
