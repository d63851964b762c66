"""Operators that DeepSpeed compiles: the lock that a killed run leaves is named, with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdp_deepspeed.cli import main


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In torch's folder of DeepSpeed's Adam."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()
    return tmp_path / "cpu_adam/lock"


def test_env_names_locks(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert f"cpu_adam: no process here has {lock} open" in capsys.readouterr().out
    with lock.open():
        assert main(["env"]) == 0
        assert f"cpu_adam: process {os.getpid()} compiles it" in capsys.readouterr().out
