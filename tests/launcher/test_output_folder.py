"""Each program in launch/, started in the output folder of another run that has not ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from output_folder import hold
from tests.helpers.programs import refusal
from tests.launcher import test_pretrain, test_pretrain_fsdp2, test_train_vision

Command = Callable[[Path], list[str]]
PROGRAMS: dict[str, Command] = {
    "pretrain": lambda folder: test_pretrain.command(folder, {"path": "unread"}, "run", 3),
    "pretrain_fsdp2": lambda folder: test_pretrain_fsdp2.command(folder, "run", 3),
    "train_vision": lambda folder: test_train_vision.command(folder, "run", 3),
}


@pytest.mark.parametrize(
    "command",
    [pytest.param(PROGRAMS[name], marks=[pytest.mark.slow] * (name != "pretrain_fsdp2"), id=name) for name in PROGRAMS],
)
def test_the_second_run_in_a_folder_names_the_first_and_stops(tmp_path: Path, command: Command) -> None:
    hold(tmp_path / "run")  # by this process
    before = sorted(tmp_path.rglob("run/*"))
    error = refusal(command(tmp_path), tmp_path / "log")
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()} on " in error
    assert sorted(tmp_path.rglob("run/*")) == before
