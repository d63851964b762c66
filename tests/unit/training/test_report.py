"""report.json: every number comes from the run's own records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.training.loop import Run
from sdp_deepspeed.training.report import write_report
from sdp_deepspeed.training.report_table import load_report
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.user_errors import RunFolderError
from tests.helpers.example_reports import phase


class Engine:
    """What a report asks of a stock engine."""

    device = torch.device("cpu")

    def zero_optimization_stage(self) -> int:
        return 1

    def train_batch_size(self) -> int:
        return 8

    def train_micro_batch_size_per_gpu(self) -> int:
        return 4


TASK: Any = SimpleNamespace(items="tokens")


@dataclass
class Batches:
    sequence_length: int = 16


@dataclass
class Data:
    train: Batches


def run_in(path: Path, *records: dict[str, Any]) -> Run:
    folder = RunFolder(path, writes=True)
    folder.create()
    data: Any = Data(Batches())
    options: Any = SimpleNamespace(host="deepspeed")
    run = Run(options=options, engine=Engine(), data=data, folder=folder, world=OneRank(), task=TASK)
    for record in records:
        run.step += record["kind"] == "train"
        folder.metrics.append({"step": run.step} | record)
    return run


def step(seconds: float, *, timed: bool = True) -> dict[str, Any]:
    return {"kind": "train", "seconds": seconds, "timed": timed}


def test_the_last_evaluation_and_the_steps_that_may_be_timed(tmp_path: Path) -> None:
    evaluations = [{"kind": "evaluation", "dense_validation_loss": loss} for loss in (2.0, 1.5)]
    counted = {"weights": 1, "gradients": 1, "optimizer": 2, "peak": 5, "sent": 1}
    early = {"kind": "figures", "step": 2, "first_step": 1, "ranks": [counted | {"flops": 100}]}
    figures = {"kind": "figures", "step": 4, "first_step": 4, "ranks": [counted | {"flops": 10}]}
    steps = [step(100, timed=False), step(1), step(2), step(3)]
    write_report(run_in(tmp_path, evaluations[0], *steps, early, figures, evaluations[1]))
    report = load_report(tmp_path)
    assert (report["label"], report["num_ranks"], report["steps"], report["tokens_per_step"]) == ("ZeRO-1", 1, 4, 128)
    assert (report["coverage"], report["plan_hash"]) == (1.0, None)
    assert (report["dense_validation_loss"], report["ranks"]) == (1.5, figures["ranks"])
    assert report["flops"] == 3 * 100 + 10
    assert report["step_seconds"] == pytest.approx({"median": 2, "p10": 1.2, "p90": 2.8, "num_steps": 3})
    assert report["versions"].keys() == {"sdp_deepspeed", "deepspeed", "torch", "transformers"}


def test_phases_have_figures_of_their_own(tmp_path: Path) -> None:
    """Three steps in the first phase, of which one is timed, and one in the second."""
    counted = {"weights": 1, "gradients": 1, "optimizer": 2, "peak": 5, "sent": 1}
    figures = [
        {"kind": "figures", "step": step, "first_step": first, "ranks": [counted | {"flops": flops}]}
        for step, first, flops in ((2, 1, 100), (4, 4, 10))
    ]
    first, second = phase(0, 0, "SDP 2/4"), phase(3, 1, "dense")
    steps = [step(100, timed=False), step(1), step(2), second, step(3)]
    write_report(run_in(tmp_path, first, *steps, *figures))
    report = load_report(tmp_path)
    assert (report["label"], report["coverage"]) == ("SDP 2/4, then dense + ZeRO-1", (3 * 0.5 + 1) / 4)
    assert [(part["label"], part["steps"]) for part in report["phases"]] == [("SDP 2/4", 3), ("dense", 1)]
    assert [part["ranks"] for part in report["phases"]] == [figure["ranks"] for figure in figures]
    assert report["flops"] == 3 * 100 + 10
    assert report["step_seconds"]["num_steps"] == 3


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    write_report(run_in(tmp_path, step(1)))
    report = load_report(tmp_path)
    names = ("step_seconds", "ranks", "flops", "dense_validation_loss", "phases")
    assert [report[name] for name in names] == [None] * len(names)


def test_no_report_of_a_run_that_lost_records(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run.folder.metrics.append({"step": 1} | step(1))
    with pytest.raises(RunFolderError, match="No space left"):
        write_report(run)
    assert not (tmp_path / "report.json").exists()
