"""Checkpoints on the disk as dense tensors, read in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, fill
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader


def dense_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint: weights, masters and moments by key."""
    reader = SafetensorsReader(folder)
    tensors, chunks = {}, {}
    for key, info in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(info, TensorStorageMetadata)
        tensors[key] = torch.full(info.size, torch.nan).to(info.properties.dtype)
        chunks[key] = Chunks(info.size, info.properties.dtype)
        chunks[key].add(Box.whole(info.size), tensors[key])
    fill(chunks, reader)
    return tensors
