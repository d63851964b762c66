"""Exports of checkpoints that were written without a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from tests.helpers.dense_checkpoints import tensors_in, write_checkpoint
from tests.helpers.training import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_buffers_keep_their_numbers(tmp_path: Path) -> None:
    weights: dict[str, torch.Tensor] = {
        "weight/bn.num_batches_tracked": torch.tensor(7),
        "weight/bn.mean": torch.ones(3),
    }
    write_checkpoint(tmp_path, weights)
    maker: Callable[[], Path] = partial(export, tmp_path / "tag", tmp_path / "out", ExportFormat(fp32=True))
    assert_identical(tensors_in(maker()), {key.removeprefix("weight/"): value for key, value in weights.items()})
