"""What a host says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.hosts import probe as module
from sdp_deepspeed.hosts.probe import Probe
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.training.model import build_model
from tests.helpers.repository import ROOT

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, KEY: {"coverage": 0.5}}


def options(folder: Path, **changed: Any) -> list[str]:
    for name, content in (("model", MODEL), ("config", CONFIG | changed)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    files = ["--model", str(folder / "model.json"), "--deepspeed_config", str(folder / "config.json")]
    return [*files, "--run-folder", str(folder / "runs" / "mine"), "--steps", "10"]


def test_settings_have_the_plan_that_the_run_will_make(tmp_path: Path) -> None:
    block = parse(CONFIG)
    assert block is not None
    expected, _ = plan_model(build_model(MODEL, seed=1), block, 4)
    found = Probe().settings(options(tmp_path), [2, 2])
    assert found["plan"] == expected.hash
    assert found["run folder"] == str(tmp_path / "runs" / "mine")


def test_other_files_have_other_digests(tmp_path: Path) -> None:
    one = Probe().settings(options(tmp_path), [2, 2])
    other = Probe().settings(options(tmp_path, gradient_clipping=1.0), [2, 2])
    assert one["config"] != other["config"]
    assert one["plan"] == other["plan"]
    wider = Probe().settings(options(tmp_path, **{KEY: {"coverage": 1}}), [2, 2])
    assert wider["plan"] != other["plan"]


def test_a_run_without_subnetworks_has_no_plan(tmp_path: Path) -> None:
    assert "plan" not in Probe().settings([*options(tmp_path), "--baseline"], [2, 2])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    given = options(tmp_path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(ValueError, match="--model: cannot read"):
        Probe().settings(given, [2])


def test_entries_in_a_folder_are_seen_until_they_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEING_SECONDS", 0.0)
    one, other = Probe(), Probe()
    place = one.mark(str(tmp_path / "runs" / "not yet"), "a")
    assert place == str(tmp_path)
    assert other.see(place, ["a", "b"]) == ["b"]
    assert other.see(str(tmp_path / "elsewhere"), ["a"]) == ["a"]
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    one, other = Probe(), Probe()
    port = one.listen(0, "mine")
    with pytest.raises(ValueError, match=f"port {port}: Address already in use"):
        other.listen(port, "theirs")
    assert other.reach({"mine": ["127.0.0.1", port]}) == {}
    assert other.reach({"theirs": ["127.0.0.1", port]}) == {"theirs": "another program answers"}
    one.close()
    assert "refused" in other.reach({"mine": ["127.0.0.1", port]})["mine"]


def test_the_program_answers_in_lines_and_keeps_its_answers_apart() -> None:
    questions = [["clock", {}], ["listen", {"port": -1, "word": "x"}], ["nothing", {}], ["devices", {}]]
    done = subprocess.run(
        [sys.executable, "-m", "sdp_deepspeed.hosts.probe"],
        input="".join(json.dumps(question) + "\n" for question in questions),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    clock, port, nothing, devices = map(json.loads, done.stdout.splitlines())
    assert clock[0] == "ok"
    assert abs(clock[1] - time.time()) < 60
    assert port[0] == nothing[0] == "error"
    assert "OverflowError" in port[1]
    assert "AttributeError" in nothing[1]
    assert devices[1]["count"] > 0
    assert done.returncode == 0
