"""What DeepSpeed's universal format stores otherwise than we do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sdp_deepspeed.checkpoint.interop.name_matching import NameMap
from sdp_deepspeed.checkpoint.interop.universal import UniversalReader
from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, LoadPlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_vocabularies_are_padded_to_the_models(tmp_path: Path) -> None:
    """The format stores them without padding; the new rows are zeros, in weights and moments."""
    stored = torch.arange(12.0).view(4, 3)
    (tmp_path / "zero" / "words").mkdir(parents=True)
    for kind in ("fp32", "exp_avg"):
        torch.save({"param": stored, "vocab_tensor": True}, tmp_path / "zero" / "words" / f"{kind}.pt")
    reader = UniversalReader.of_folder(tmp_path, NameMap(frozenset({"words"})), {"words": (6, 3)})
    values = {key: torch.full((4, 3), torch.nan) for key in ("weight/words", "exp_avg/words")}
    chunks: dict[str, Any] = {key: Chunks((6, 3), torch.float32) for key in values}
    for key, chunk in chunks.items():
        chunk.add(Box((1, 0), (2, 3)), values[key][:2])
        chunk.add(Box((4, 0), (2, 3)), values[key][2:])
    dcp.load(chunks, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    assert all(torch.equal(value, torch.cat([stored[1:3], torch.zeros(2, 3)])) for value in values.values())
