"""Exports of checkpoints that were written without a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from sdp_deepspeed.checkpoint.storage.names import INDEX, tensors_file
from tests.helpers.dense_checkpoints import forge, forge_manifest, tensors_in, write_checkpoint
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


WEIGHTS = {"weight/head.weight": torch.arange(6.0).view(2, 3), "weight/embedding.weight": torch.ones(4, 3)}


def forged(tmp_path: Path, change: Callable[[Any], Any]) -> Path:
    write_checkpoint(tmp_path, WEIGHTS)
    forge(tmp_path / "tag" / INDEX, change)
    return tmp_path / "tag"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["weight/head.weight"].update(chunks=[]), "do not cover each element"),
        (lambda index: index["weight/head.weight"].update(shape=[3, 3]), "do not cover each element"),
        (lambda index: index["weight/embedding.weight"].update(dtype="I32"), r"F32 \[4, 3\], and .* says I32"),
        (lambda index: index["weight/embedding.weight"].update(dtype="F16"), r"F32 \[4, 3\], and .* says F16"),
        (lambda index: index.update({"weight/head.weight": index["weight/embedding.weight"]}), "head.weight"),
    ],
)
def test_an_index_that_is_not_of_its_files_is_not_exported(
    tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    path = forged(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        export(path, tmp_path / "out", ExportFormat())
    assert not (tmp_path / "out").exists()


def test_a_chunk_of_another_size_is_not_stretched(tmp_path: Path) -> None:
    """One row where the index says four would be copied to all of them."""
    write_checkpoint(tmp_path, WEIGHTS)
    file = tmp_path / "tag" / tensors_file(0)
    save_file({"weight/head.weight@0,0": torch.zeros(2, 3), "weight/embedding.weight@0,0": torch.ones(1, 3)}, file)
    forge_manifest(tmp_path / "tag", file)
    with pytest.raises(ValueError, match=r"embedding.weight@0,0 as F32 \[1, 3\]"):
        export(tmp_path / "tag", tmp_path / "out", ExportFormat())
