"""launch/pretrain.py as a user runs it: under the deepspeed launcher, interrupted, resumed, wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from sdp_deepspeed.config import KEY
from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.data.prepare import prepare
from tests.helpers.launched_runs import (
    NUM_RANKS,
    TIME_LIMIT,
    Forked,
    Running,
    command,
    finish,
    launched,
    read_metrics,
    train_records,
)
from tests.helpers.repository import ROOT

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    KEY: {"coverage": 0.5},
}
# Four steps of the dense model; then subnetworks of another strategy in larger micro-batches, drawn anew after steps
# 6, 9, ...
SCHEDULED: dict[str, Any] = {
    "schedule": [
        {"until_step": 4, "coverage": 1.0},
        {"coverage": 0.5, "strategy": "neuron", "train_micro_batch_size_per_gpu": 4},
    ],
    "redraw_interval": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON files for a run of milliseconds per step; the data are prepared once for all runs."""
    folder = tmp_path_factory.mktemp("launch")
    data = {"source": "stdlib", "max_bytes": 300_000, "vocab_size": 300, "sequence_length": 32}
    data |= {"validation_fraction": 0.1, "validation_blocks": 5, "cache_dir": str(folder / "cache")}
    monitor = {"steps_per_print": 2, "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"}}
    scheduled = DEEPSPEED | monitor | {KEY: SCHEDULED}
    for name, content in (("model", MODEL), ("deepspeed", DEEPSPEED), ("scheduled", scheduled), ("data", data)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def interrupt(running: Running, how: str) -> None:
    if how == "ctrl-c":  # the terminal signals the whole group, and the user is impatient
        os.killpg(running.process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(running.process.pid, signal.SIGINT)
    else:  # "sigterm", what a scheduler sends to the command that it started
        running.process.terminate()


def run_and_interrupt(folder: Path, run: str, how: str, *extra: str) -> int:
    """Start a long run, interrupt it after some steps; the last step that was made. No process is left over."""
    with launched(folder, run, "--steps", "100000", *extra) as running:
        running.wait_for_step(folder / run / "metrics.jsonl", 5)
        processes = running.tree()
        interrupt(running, how)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive, running.explain()
        assert "the same command resumes" in running.log.read_text(), running.explain()
    last = max(train_records(folder, run))
    tag = (folder / run / "checkpoints" / "latest").read_text().strip()
    assert tag == f"step_{last:08d}", "the last step is the one that was saved"
    assert not (folder / run / "report.json").exists()
    return last


def test_an_interrupted_run_resumes_as_if_nothing_had_happened(folder: Path) -> None:
    """Inside a phase of a schedule, too."""
    scheduled = ("--deepspeed_config", str(folder / "scheduled.json"))
    stopped_at = run_and_interrupt(folder, "interrupted", "ctrl-c", *scheduled)
    steps = str(stopped_at + 5)
    with Forked(folder, "interrupted", "--steps", steps, *scheduled) as running:
        codes, said = running.finish()
    assert codes == [0, 0], running.explain()
    assert f"resuming at step {stopped_at}: SDP 1/2 forward x neuron + ZeRO-1 (phase 2 of 2)" in said
    said = finish(folder, "straight", "--steps", steps, *scheduled, launcher="torchrun")
    assert "starting: dense + ZeRO-1 (phase 1 of 2) on 2 ranks" in said
    assert "step 4: phase 2 of 2, SDP 1/2 forward x neuron + ZeRO-1, micro-batches of 4 (re-planned in " in said
    resumed, straight = train_records(folder, "interrupted"), train_records(folder, "straight")
    for field in ("loss", "loss_of", "gradient_norm", "learning_rate", "epoch"):
        assert [r[field] for r in resumed.values()] == [r[field] for r in straight.values()], field
    weights = [(folder / run / "hf" / "model.safetensors").read_bytes() for run in ("interrupted", "straight")]
    assert weights[0] == weights[1]
    assert [r["loss_of"] for r in resumed.values()][:6] == ["dense"] * 4 + ["subnetwork"] * 2
    assert [r["first_step"] for r in read_metrics(folder, "interrupted", "figures")] == [1, 5, stopped_at + 1]
    check_phases(folder, int(steps))
    check_what_a_run_leaves(folder / "interrupted", int(steps))
    check_monitor(folder, "straight", int(steps))
    check_evaluation_is_of_the_exported_model(folder, "interrupted", int(steps))
    check_killed_after_the_last_save(folder, "straight", int(steps), *scheduled)
    again = subprocess.run(
        [sys.executable, *command(folder, "interrupted", "--steps", steps, *scheduled)[5:]],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": str(NUM_RANKS), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert f"has its {steps} steps already" in again.stdout, "a finished run is not trained again"


def check_phases(folder: Path, steps: int) -> None:
    """Both runs record the same plans, and report what each phase was."""
    names = ("step", "phase", "coverage", "plan_hash")
    records = [read_metrics(folder, run, "phase") for run in ("interrupted", "straight")]
    first, second = ([[record[name] for name in names] for record in each] for each in records)
    assert first == second
    # A draw may be the one before.
    assert [step for step, *_ in first[:2]] == [0, 4]
    assert {step for step, *_ in first[2:]} <= set(range(6, steps + 1, 3))
    assert len({plan_hash for *_, plan_hash in first}) > 2
    report = json.loads((folder / "interrupted" / "report.json").read_text())
    assert report["label"] == "dense, then SDP 1/2 forward x neuron + ZeRO-1"
    assert [part["steps"] for part in report["phases"]] == [4, steps - 4]
    assert report["coverage"] == pytest.approx((4 + 0.5 * (steps - 4)) / steps)
    flops = [sum(rank["flops"] for rank in part["ranks"]) for part in report["phases"]]
    assert flops[1] < flops[0]
    assert report["flops"] == flops[0] * 4 + flops[1] * (steps - 4)


def check_evaluation_is_of_the_exported_model(folder: Path, run: str, steps: int) -> None:
    """The recorded loss is that of the dense model: Transformers alone finds it with the exported weights."""
    data = DataConfig.from_dict(json.loads((folder / "data.json").read_text()))
    validation = build(data, micro_batch=1, rank=0, world_size=1).validation
    assert validation is not None
    model = AutoModelForCausalLM.from_pretrained(folder / run / "hf")
    with torch.no_grad():
        terms = [(model(**inputs).loss.item() * weight, weight) for inputs, weight in validation]
    recorded = read_metrics(folder, run, "evaluation")[-1]
    loss_sum, num_tokens = map(sum, zip(*terms, strict=True))
    assert (recorded["step"], recorded["num_tokens"]) == (steps, num_tokens)
    assert recorded["dense_validation_loss"] == pytest.approx(loss_sum / num_tokens, abs=1e-4)


def check_monitor(folder: Path, run: str, steps: int) -> None:
    last = {path.stem: path.read_text().split()[-1] for path in (folder / "csv").glob("*.csv")}  # this run's
    dense, watched = read_metrics(folder, run, "evaluation")[-1], train_records(folder, run)[steps // 2 * 2]
    assert last["Validation_Samples_dense_loss"] == f"{steps * 8},{dense['dense_validation_loss']}"
    assert float(last["Train_Samples_subnetwork_loss"].split(",")[1]) == pytest.approx(watched["loss"], rel=1e-5)


def check_killed_after_the_last_save(folder: Path, run: str, steps: int, *extra: str) -> None:
    """A run that was killed between its last checkpoint and its last evaluation ends with the same report."""
    report, metrics = folder / run / "report.json", folder / run / "metrics.jsonl"
    whole = json.loads(report.read_text())
    report.unlink()
    *kept, last = metrics.read_text().splitlines(keepends=True)
    assert '"kind": "evaluation"' in last
    metrics.write_text("".join(kept))
    with Forked(folder, run, "--steps", str(steps), *extra) as running:
        assert running.finish()[0] == [0, 0], running.explain()
    evaluations = read_metrics(folder, run, "evaluation")
    assert [record["step"] for record in evaluations][-1] == steps
    assert len(evaluations) == len({record["step"] for record in evaluations}), "no evaluation twice"
    assert json.loads(report.read_text()) == whole, "measured figures and the final evaluation included"


def check_what_a_run_leaves(run: Path, steps: int) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "plan.json", "metrics.jsonl", "report.json", "checkpoints", "hf"} <= names
    report = json.loads((run / "report.json").read_text())
    assert report["steps"] == steps
    assert report["plan_hash"] == json.loads((run / "plan.json").read_text())["hash"]
    assert len(report["ranks"]) == NUM_RANKS
    assert all(rank["peak"] > rank["weights"] > 0 and rank["sent"] > 0 for rank in report["ranks"])
    sample = subprocess.run(
        [sys.executable, "launch/sample.py", str(run / "hf"), "def ", "--tokens", "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert sample.returncode == 0, sample.stderr
    assert "LlamaForCausalLM" in sample.stdout
    assert "def " in sample.stdout


def test_sigterm_to_the_command_saves_plain_deepspeed_too(folder: Path) -> None:
    run_and_interrupt(folder, "baseline", "sigterm", "--baseline")
    assert train_records(folder, "baseline")[1]["loss_of"] == "dense"
    assert not (folder / "baseline" / "plan.json").exists()


def test_a_mistake_in_the_block_is_told_once_without_a_traceback(folder: Path) -> None:
    wrong = folder / "wrong.json"
    wrong.write_text(json.dumps(DEEPSPEED | {KEY: {"coverag": 0.5}}))
    with launched(folder, "wrong", "--steps", "3", "--deepspeed_config", str(wrong)) as running:
        assert running.wait() == 2, running.explain()
        output = running.log.read_text()
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1, running.explain()
    assert f"{KEY}.coverag" in errors[0]
    assert "Traceback" not in output
    assert not (folder / "wrong" / "config.json").exists()


def test_damaged_data_are_told_once_without_a_traceback(folder: Path) -> None:
    data = json.loads((folder / "data.json").read_text()) | {"cache_dir": str(folder / "damaged_cache")}
    (folder / "damaged.json").write_text(json.dumps(data))
    prepared = prepare(DataConfig.from_dict(data))
    (prepared / "meta.json").write_text('{"identity": ')
    with launched(folder, "damaged", "--steps", "3", "--data", str(folder / "damaged.json")) as running:
        assert running.wait() == 2, running.explain()
        output = running.log.read_text()
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1, running.explain()
    assert f"{prepared / 'meta.json'} cannot be read" in errors[0]
    assert f"delete {prepared}" in errors[0]
    assert "Traceback" not in output


def test_a_folder_that_cannot_be_made_is_one_error_on_all_ranks(folder: Path) -> None:
    (folder / "occupied").write_text("a file")
    with launched(folder, "occupied/run", "--steps", "3", log="occupied.run") as running:
        assert running.wait() == 2, running.explain()
        output = running.log.read_text()
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1, running.explain()
    assert f"--run-folder: cannot make {folder / 'occupied/run'}: Not a directory; choose another" in errors[0]
    assert "Traceback" not in output
    assert "terminate called" not in output


def test_a_full_disk_ends_all_ranks_with_one_error(folder: Path) -> None:
    metrics = folder / "full" / "metrics.jsonl"
    with Forked(folder, "full", "--steps", "100000") as running:
        running.wait_for_step(metrics, 3)
        (folder / "full_device").symlink_to("/dev/full")
        os.replace(folder / "full_device", metrics)
        codes, output = running.finish()
    assert codes == [1, 1], running.explain()
    assert output.count("error: ") == 1, running.explain()
    assert f"error: cannot write {metrics}: No space left on device; make it possible" in output
    assert "Traceback" not in output
