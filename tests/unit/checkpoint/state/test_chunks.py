"""Boxes of dense tensors with their values, and what is said where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, read_chunks, translated_dcp_errors
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from tests.helpers.dense_checkpoints import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def rows(num_rows: int) -> Chunks:
    chunks = Chunks((num_rows, 2), torch.float32)
    for row in range(num_rows):
        chunks.add(Box((row, 0), (1, 2)), torch.full((1, 2), float(row)))
    return chunks


def test_ranks_share_chunks() -> None:
    shares = [rows(5).share(rank, 2) for rank in range(2)]
    assert [[box.offsets[0] for box in share.boxes()] for share in shares] == [[0, 2, 4], [1, 3]]
    assert shares[1].shape == (5, 2)
    assert shares[1].at((3, 0)).tolist() == [[3.0, 3.0]]


def test_values_must_have_the_box_s_shape() -> None:
    with pytest.raises(AssertionError, match=r"\(2,\) is not \(1, 2\)"):
        Chunks((3, 2), torch.float32).add(Box((0, 0), (1, 2)), torch.zeros(2))


def test_parts_are_read_where_they_belong(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"weight/w": torch.arange(6.0).view(3, 2)})
    reader, target = SafetensorsReader(tmp_path / "tag"), rows(3).share(1, 3)
    read_chunks({"weight/w": target}, reader)
    assert target.at((1, 0)).tolist() == [[2.0, 3.0]]
    with pytest.raises(ValueError, match=r"^here: .*lost"), translated_dcp_errors("here"):
        read_chunks({"weight/lost": target}, reader)
