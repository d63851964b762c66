"""GPUs that torch cannot use are named; nothing is said where the CPU is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdp_deepspeed import gpus

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by ..."


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """With a GPU, a driver that is too old for torch, and a user who asks for nothing."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(gpus, "_DEV", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    return tmp_path


def test_a_driver_that_is_too_old_is_named(machine: Path) -> None:
    words = gpus.unusable_gpus()
    assert words is not None
    assert f"({machine}/nvidia0): {TOO_OLD.partition('. ')[0]}. Update their driver" in words


def test_a_torch_for_cpus_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "it was built for CPUs" in str(gpus.unusable_gpus())


HIDDEN = ("CUDA_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=-1", "CUDA_VISIBLE_DEVICES=NoDevFiles", "DS_ACCELERATOR=cpu")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_who_asks_for_the_cpu_is_not_told(machine: Path, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = hidden.partition("=")
    monkeypatch.setenv(name, value)
    assert gpus.unusable_gpus() is None


@pytest.mark.parametrize("named", ["0", "3,1", "GPU-8932f937-d72c", "MIG-3f2a"])
def test_who_chooses_among_gpus_is_told(machine: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.unusable_gpus() is not None


def test_gpus_that_work_and_none_at_all_are_not_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpus.unusable_gpus() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (machine / "nvidia0").unlink()
    assert gpus.unusable_gpus() is None
