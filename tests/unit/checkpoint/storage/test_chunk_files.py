"""Files of chunks: what is in them, and what an index may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, SavePlanner
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader, SafetensorsWriter
from sdp_deepspeed.checkpoint.storage.names import INDEX


def write(folder: Path, state: dict[str, Chunks]) -> None:
    writer = SafetensorsWriter(folder, "t.safetensors")
    planner = SavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.write_data(planner.create_local_plan(), planner)


def test_chunks_are_aligned_to_their_elements(tmp_path: Path) -> None:
    """Whoever maps the file into memory reads its tensors where they lie."""
    state = {}
    for dtype in (torch.bfloat16, torch.uint8, torch.float32, torch.int64):
        state[str(dtype)] = Chunks((3,), dtype)
        state[str(dtype)].add(Box((0,), (3,)), torch.ones(3, dtype=dtype))
    write(tmp_path, state)
    content = (tmp_path / "t.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    offsets = {name: start + entry["data_offsets"][0] for name, entry in json.loads(content[8:start]).items()}
    assert {name: offsets[f"{name}@0"] % chunks.dtype.itemsize for name, chunks in state.items()} == dict.fromkeys(
        state, 0
    )


def test_one_element_has_any_stride(tmp_path: Path) -> None:
    """A chunk of one element of a transposed tensor is contiguous to PyTorch, yet not as bytes."""
    values = torch.arange(18.0).view(3, 6).T[2:3, 1:2]
    chunks = Chunks((6, 3), torch.float32)
    chunks.add(Box((2, 1), (1, 1)), values)
    chunks.add(Box((0, 0), (2, 3)), torch.arange(18.0).view(3, 6).T[:2])
    write(tmp_path, {"w": chunks})
    stored = load_file(tmp_path / "t.safetensors")
    assert stored["w@2,1"].tolist() == [[8.0]]
    assert stored["w@0,0"].tolist() == [[0.0, 6.0, 12.0], [1.0, 7.0, 13.0]]


@pytest.mark.parametrize("name", ["/tmp/t.safetensors", "../t.safetensors"])
def test_an_index_names_files_beside_it(tmp_path: Path, name: str) -> None:
    chunk = {"offsets": [0], "sizes": [1], "file": name}
    index = {"weight/w": {"dtype": "F32", "shape": [1], "chunks": [chunk]}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="beside it"):
        SafetensorsReader(tmp_path).read_metadata()
