"""Operators that DeepSpeed compiles: the lock that a killed run leaves is named, with what to do."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import pytest
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
from torch.utils.file_baton import FileBaton

import sdp_deepspeed  # noqa: F401  (its import hook)
from sdp_deepspeed.cli import main
from sdp_deepspeed.engine import operators


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In torch's folder of DeepSpeed's Adam."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for ninja
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()
    return tmp_path / "cpu_adam/lock"


def test_a_wait_for_a_lock_names_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    is_said, wait = threading.Event(), FileBaton.wait

    def wait_for_user(self: FileBaton) -> None:
        """Who reads it deletes the lock; if nothing is said, the test fails after a minute."""
        is_said.wait(60)
        lock.unlink()
        wait(self)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            is_said.set()

    monkeypatch.setattr(FileBaton, "wait", wait_for_user)
    monkeypatch.setattr(operators, "PATIENCE", 0.01)
    monkeypatch.setattr(operators.logger, "handlers", [Keep()])
    with pytest.raises(ImportError):  # nothing was compiled
        CPUAdamBuilder().load(verbose=False)
    (text,) = said
    assert "cpu_adam" in text
    assert f"no process here has {lock} open" in text
    assert "delete it" in text


def test_env_names_locks(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert f"cpu_adam: no process here has {lock} open" in capsys.readouterr().out
    with lock.open():
        assert main(["env"]) == 0
        assert f"cpu_adam: process {os.getpid()} compiles it" in capsys.readouterr().out
