"""launch/pretrain.py: stopped and resumed, mapped and streamed, on other numbers of ranks, without its launcher."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data import Data
from tests.helpers import programs
from tests.helpers.ports import free_port
from tests.helpers.programs import Ranks, exported, launched, refusal, run, trainer_log

LENGTH = 16
RECIPE: dict[str, Any] = {
    "model": programs.LLAMA,
    "data": {"sequence_length": LENGTH, "vocab_size": 300, "validation_fraction": 0.1, "validation_blocks": 8},
    "training": programs.TRAINER | {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 1000},
    "deepspeed": {
        **programs.DEEPSPEED,
        # A phase ends in the middle of the second epoch, and draws change during the first one.
        "subnetwork_data_parallel": {
            "schedule": [{"until_step": 16, "coverage": 0.5}, {"coverage": 1.0}],
            "redraw_interval": 4,
        },
    },
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A source of some 90 blocks of LENGTH tokens: at 8 a step an epoch has about 11 steps."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdef", k=3)) for _ in range(40)]
    for index in range(8):
        rows = [{"text": " ".join(draw.choices(words, k=24))} for _ in range(5)]
        (tmp_path / f"text{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": "json", "data_files": str(tmp_path / "text*.jsonl")}


def command(folder: Path, source: dict[str, Any], output: str, steps: int, *overrides: str) -> list[str]:
    recipe = RECIPE | {"data": RECIPE["data"] | {"sources": [source]}}
    return programs.command("pretrain.py", recipe, folder, output, steps, *overrides)


def has_begun(output: str) -> bool:
    """In the first epoch and phase, between two draws."""
    return output.count("'grad_norm'") >= 5


def stop_one_rank(start: list[str], folder: Path, size: int) -> None:
    """One is asked, all save and stop."""
    with Ranks(start, folder / "stopped.log", size) as ranks:
        ranks.wait_for(has_begun)
        os.kill(ranks.processes[1].pid or 0, signal.SIGTERM)
        ranks.finish()


def stop_launcher(launcher: str, start: list[str], folder: Path, size: int) -> None:
    """The launcher is asked: torchrun tells the ranks, the deepspeed command ends alone."""
    scripts = Path(sys.executable).parent
    if launcher == "deepspeed":
        command = [str(scripts / "deepspeed"), "--num_gpus", str(size), "--master_port", str(free_port())]
    else:
        command = [str(scripts / "torchrun"), "--standalone", "--nproc-per-node", str(size)]
    with launched([*command, f"launch/{start[0]}", *start[1:]], folder / "stopped.log") as running:
        running.wait_for(has_begun)
        ranks = running.tree()[1:]
        running.process.terminate()
        for rank in ranks:
            rank.wait(300)


@pytest.mark.parametrize(
    ("stop", "streaming", "size"),
    [
        pytest.param(partial(stop_launcher, "deepspeed"), False, 2, marks=pytest.mark.slow),
        (stop_one_rank, True, 2),  # test_pretrain_fsdp2.py has mapped data
        pytest.param(partial(stop_launcher, "torchrun"), True, 2, marks=pytest.mark.slow),
        pytest.param(stop_one_rank, False, 4, marks=pytest.mark.slow),
        pytest.param(stop_one_rank, True, 4, marks=pytest.mark.slow),
    ],
    ids=["without_deepspeed_launcher", "sigterm_streaming", "without_torchrun", "sigterm_4", "sigterm_streaming_4"],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, text: dict[str, Any], stop: Callable[..., None], streaming: bool, size: int
) -> None:
    options = [f"data.streaming={streaming}", f"training.per_device_train_batch_size={8 // size}"]
    stop(command(tmp_path, text, "stopped", 1_000_000, *options), tmp_path, size)
    assert "the same command resumes" in (tmp_path / "stopped.log").read_text()
    stopped_at = len(trainer_log(tmp_path / "stopped"))
    steps = max(18, stopped_at + 3)
    resume = command(tmp_path, text, "stopped", steps, *options, "training.save_strategy=no")
    run(resume, tmp_path / "resumed.log", size)
    run(command(tmp_path, text, "straight", steps, *options), tmp_path / "straight.log", size)
    resumed, straight = (
        [entry | {"epoch": None} for entry in trainer_log(tmp_path / name)]  # of a stream it is a share of max_steps
        for name in ("stopped", "straight")
    )
    assert len(straight) == steps
    assert resumed == straight
    assert {"subnetwork_loss", "loss"} <= {name for entry in straight for name in entry}, "both phases"
    assert exported(tmp_path / "stopped") == exported(tmp_path / "straight")
    if not streaming:
        again = run(resume, tmp_path / "again.log", size)
        assert f"the run had finished at step {steps}" in again
        assert exported(tmp_path / "stopped") == exported(tmp_path / "straight"), "given once more"
        assert len(trainer_log(tmp_path / "stopped")) == steps
        measured = json.loads((tmp_path / "straight/eval_results.json").read_text())["eval_loss"]
        loss = programs.exported_loss(tmp_path / "straight", Data([text], **RECIPE["data"]))
        assert measured == pytest.approx(loss, rel=1e-5)  # fp32, other batches


def test_the_order_of_samples_is_the_same_on_any_number_of_ranks(tmp_path: Path, text: dict[str, Any]) -> None:
    """At C = 1 the same global batches give the same losses, with other ranks from the middle of an epoch on."""
    whole = ["sdp.schedule=null", "sdp.redraw_interval=null", "sdp.coverage=1.0"]
    run(command(tmp_path, text, "two", 14, *whole), tmp_path / "two.log")
    for ranks, steps in ((2, 7), (1, 14)):
        sizes = [f"training.per_device_train_batch_size={8 // ranks // 2}", "training.gradient_accumulation_steps=2"]
        run(command(tmp_path, text, "other", steps, *whole, *sizes), tmp_path / f"{ranks}.log", ranks)
    losses = [[entry["loss"] for entry in trainer_log(tmp_path / name)] for name in ("two", "other")]
    assert len(losses[0]) == 14
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # rounding of sums, in fp32


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.vocab_size=10", "model.vocab_size: got 10, but the tokenizer has"),
        ("data.sequence_length=64", "data.sequence_length: got 64, but the model has 32 positions"),
        ("training.per_device_train_batch_size=5000", "a step needs 5000"),
    ],
)
def test_what_cannot_train_ends_before_it_begins(
    tmp_path: Path, text: dict[str, Any], override: str, said: str
) -> None:
    start = command(tmp_path, text, "run", 3, override)
    assert said in refusal(start, tmp_path / "log", size=2 if said.startswith("model") else 1)
