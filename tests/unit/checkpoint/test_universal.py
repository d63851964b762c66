"""What is read from DeepSpeed's pickles: values that cannot run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from sdp_deepspeed.checkpoint.universal import convert
from tests.helpers.foreign_code import Malicious


class Attribute:
    """Pickled by `getattr`, as Python 3.11.0 to 3.11.3 does with members of enums."""

    def __init__(self, kind: type, name: str) -> None:
        self.of = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.of


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Attribute(ZeroStageEnum, "weights"), "cannot convert"),  # it was read
        (Attribute(LossScaler, "__init__"), "could run code"),
        (Malicious, "could run code"),
    ],
)
def test_files_of_strangers(content: Any, words: str, tmp_path: Path) -> None:
    content = content(tmp_path) if content is Malicious else content
    torch.save({"strange": content}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=words):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
