"""What is read from DeepSpeed's pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from sdp_deepspeed.checkpoint.interop.safe_pickles import read_known
from tests.helpers.foreign_code import Malicious


class _Attribute:
    def __init__(self, kind: type, name: str) -> None:
        self._reduced = getattr, (kind, name)

    def __reduce__(self) -> Any:
        return self._reduced


def test_members_of_enums_as_older_pythons_pickle_them(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 does it by `getattr`, which here gives ZeRO's stages and nothing else."""
    torch.save({"stage": _Attribute(ZeroStageEnum, "weights")}, tmp_path / "stage.pt")
    assert read_known(tmp_path / "stage.pt") == {"stage": ZeroStageEnum.weights}
    torch.save({"stage": _Attribute(LossScaler, "__init__")}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="foreign code"):
        read_known(tmp_path / "other.pt")


def test_tensors_of_a_gpu_are_read_into_host_memory(tmp_path: Path) -> None:
    """Whatever device a file names; here there may be no such device."""
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
        torch.save({"weight": torch.arange(3)}, tmp_path / "file.pt")
    weight = read_known(tmp_path / "file.pt")["weight"]
    assert weight.device.type == "cpu"
    assert weight.tolist() == [0, 1, 2]


def test_the_malicious_file_would_run(tmp_path: Path) -> None:
    """Else nothing is shown by tests that such a file is refused."""
    torch.save(Malicious(tmp_path), tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "ran").is_dir()
