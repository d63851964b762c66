"""What `sdp teams` gives to each team."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest
import torch

from sdp_deepspeed.teams.launch import run_teams


@pytest.mark.parametrize(
    ("devices", "num_ranks", "expected"),
    [(None, 2, {"0,1", "2,3"}), ("7,GPU-b,5,4", 1, {"7", "GPU-b"}), ("", 3, {"none"})],
    ids=["all", "some", "too few"],
)
def test_teams_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: str | None,
    num_ranks: int,
    expected: set[str],
) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    handler = signal.getsignal(signal.SIGTERM)
    shows = "import os; print('has', os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))"
    assert run_teams(2, num_ranks, ["-c", shows]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition("] has ")[2] for line in lines if "] has " in line} == expected
    told = {line.partition(" has CUDA_VISIBLE_DEVICES=")[2] for line in lines if " has CUDA_VISIBLE_DEVICES=" in line}
    assert told == expected - {"none"}
    assert any("4 GPUs are too few" in line for line in lines) == (expected == {"none"})
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_team_that_does_not_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    started: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, *command: Any, **options: Any) -> None:
            if len(started) == 3:
                raise OSError("no more processes")
            super().__init__(*command, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(OSError, match="no more processes"):
        run_teams(2, 2, ["-c", "import time; time.sleep(60)"])
    assert [process.wait(30) for process in started] == [-signal.SIGKILL] * 3
