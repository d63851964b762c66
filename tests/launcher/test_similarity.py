"""benchmarks/similarity.py, as its user runs it on a model of two layers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import similarity as command
from benchmarks.tables.plot_similarity import short_names
from benchmarks.tables.similarity import MODE_KEY

SHAPE = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MODES = ["forward x block", "forward x neuron", "backward x block", "backward x neuron"]
LAYERS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def paragraphs(numbers: random.Random) -> str:
    """Enough of them that some are held out."""
    words = (
        "each",
        "worker",
        "trains",
        "a",
        "part",
        "of",
        "the",
        "model",
        "and",
        "together",
        "they",
        "keep",
        "it",
        "whole",
    )
    return "\n\n".join(" ".join(numbers.choices(words, k=40)) for _ in range(400))


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(paragraphs(random.Random(0)), encoding="utf-8")
    data = {"source": "files", "path": str(tmp_path / "text.txt"), "text_documents": "paragraph"}
    (tmp_path / "data.json").write_text(json.dumps(data | {"cache_dir": str(tmp_path / "cache")}), encoding="utf-8")
    (tmp_path / "model.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    options = {"model": "model.json", "data": "data.json", "output": "new/raw.json"}
    found = [word for name, file in options.items() for word in (f"--{name}", str(tmp_path / file))]
    return [*found, "--ranks", "4", "--steps", "3", "0", "--draws", "2", "--batch", "2"]


def test_measures_all_modes_and_shows_them(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(arguments)
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "new/raw.json").read_text(encoding="utf-8"))
    assert list(result["plans"]) == MODES
    assert {"commit", "versions"} <= result["provenance"].keys()
    seen = [(record["step"], record["draw"], record[MODE_KEY]) for record in result["records"]]
    assert seen == [(step, draw, mode) for step in (0, 3) for draw in (0, 1) for mode in MODES]
    for record in result["records"]:
        check_record(record, result["plans"][record[MODE_KEY]])
    assert all(word in printed for word in (*MODES, *LAYERS, "after 0 dense steps", "after 3 dense steps"))
    command.main(["--from-json", str(tmp_path / "new/raw.json")])
    assert capsys.readouterr().out == printed


def test_a_model_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn has the images")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [3, 3], "layer_type": "basic"}
    (tmp_path / "resnet.json").write_text(json.dumps({"model_type": "resnet", **sizes}), encoding="utf-8")
    files = ["--model", str(tmp_path / "resnet.json"), "--output", str(tmp_path / "raw.json")]
    command.main([*files, "--ranks", "4", "--steps", "0", "--draws", "1", "--batch", "2"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*MODES, "2 images per worker", "resnet.encoder.stages.1.layers.2"))
    records = json.loads((tmp_path / "raw.json").read_text(encoding="utf-8"))["records"]
    backward = records[MODES.index("backward x block")]["layers"]
    assert backward["resnet.encoder.stages.1.layers.0"] == pytest.approx(1.0), "its skip connection projects: shared"
    assert backward["resnet.encoder.stages.1.layers.1"] < 0.9999
    with pytest.raises(SystemExit, match="--data: unknown key 'model_type'"):
        command.main([*files, "--data", str(tmp_path / "resnet.json")])


def check_record(record: dict[str, Any], plan: dict[str, Any]) -> None:
    """Backward: shared parameters as in the dense gradient, and no farther from it than the plan permits."""
    assert list(record["layers"]) == LAYERS
    if record[MODE_KEY].startswith("forward"):
        assert all(-1 <= value < 0.9999 for value in record["layers"].values())
        assert "permitted" not in plan
        return
    inside = [record["layers"][name] for name in LAYERS if "layers" in name]
    outside = [record["layers"][name] for name in LAYERS if "layers" not in name]
    assert outside == pytest.approx([1.0] * 3, abs=1e-6)
    assert all(0.3 < value < 0.9999 for value in inside)
    assert 0 < record["distance"] <= plan["permitted"]["always"] * record["deviation"]


def test_plots_from_raw_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `plot`")
    raw = write_raw(tmp_path)
    command.main(["--from-json", str(raw), "--plot", str(tmp_path / "new/figure.svg")])
    figure = (tmp_path / "new/figure.svg").read_text(encoding="utf-8")
    assert figure.count("<!-- forward x block -->") == 1
    assert "<!-- lm_head -->" in figure
    with pytest.raises(SystemExit, match=r"error: .*doc"):
        command.main(["--from-json", str(raw), "--plot", str(tmp_path / "figure.doc")])


def test_names_in_the_plot() -> None:
    assert short_names(["model.embed_tokens", "model.layers.0", "lm_head"]) == ["embed_tokens", "0", "lm_head"]
    stages = ["encoder.stages.0.layers.0", "encoder.stages.1.layers.0", "encoder.stages.1.layers.1", "classifier.1"]
    assert short_names(stages) == ["0.0", "1.0", "1.1", "classifier.1"]


def write_raw(folder: Path) -> Path:
    """Raw figures of two modes, two draws, one step."""
    plans: dict[str, Any] = {"forward x block": {}, "backward x neuron": {"spectral_gap": 0.5}}
    plans["backward x neuron"]["permitted"] = {"expected": 0.2, "on_average": 0.25, "always": 0.75}
    records = [
        {"step": 0, "draw": draw, MODE_KEY: mode, "layers": dict.fromkeys(("model.layers.0", "lm_head"), 0.5 + draw)}
        | {"deviation": 2.0, "distance": 0.5 - 0.2 * draw}
        for draw in (0, 1)
        for mode in plans
    ]
    arguments = {"ranks": 4, "coverage": 0.5, "batch": 2, "draws": 2}
    raw = {"what": "similarity", "plans": plans, "records": records, "arguments": arguments}
    path = folder / "raw.json"
    path.write_text(json.dumps(raw | {"model": {"num_parameters": 1_500_000}}), encoding="utf-8")
    return path


def test_table_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians of 0.5 and 1.5; T / V is 0.25 and 0.15."""
    command.main(["--from-json", str(write_raw(tmp_path))])
    lines = capsys.readouterr().out.splitlines()
    assert "| model.layers.0 | 1.0000 | 1.0000 |" in lines
    assert "| backward x neuron | 0.500 | 0.2000 | 0.1500, 0.2500 | 0.2000 | 0.2500 | 0.7500 |" in lines


def test_without_matplotlib_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r'matplotlib: pip install "sdp_deepspeed\[plot\]"'):
        command.main(["--from-json", str(write_raw(tmp_path)), "--plot", str(tmp_path / "figure.png")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--coverage", "0.3"], r"coverage: 0.3 of 4 subnetworks"),
        (["--model", "missing.json"], r"--model: cannot read missing.json"),
        (["--model", __file__], r"--model: .*not JSON"),
    ],
)
def test_mistakes_are_named(arguments: list[str], change: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command.main([*arguments, *change])


def test_other_raw_figures_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"what": "step_time"}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"is not what this command writes: its \"what\" is 'step_time'"):
        command.main(["--from-json", str(other)])
    with pytest.raises(SystemExit):
        command.main(["--from-json", str(other), "--output", str(other)])
