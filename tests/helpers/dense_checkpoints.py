"""Checkpoints on the disk as dense tensors, read in one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, SavePlanner, read_chunks
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader, SafetensorsWriter
from sdp_deepspeed.checkpoint.storage.manifest import FORMAT, hashed_file, read_manifest, write_manifest
from sdp_deepspeed.checkpoint.storage.names import COMMON, rank_file, tensors_file


def dense_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint: weights, masters and moments by key."""
    reader = SafetensorsReader(folder)
    tensors, chunks = {}, {}
    for key, info in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(info, TensorStorageMetadata)
        tensors[key] = torch.full(info.size, torch.nan).to(info.properties.dtype)
        chunks[key] = Chunks(info.size, info.properties.dtype)
        chunks[key].add(Box.whole(info.size), tensors[key])
    read_chunks(chunks, reader)
    return tensors


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint without a training."""
    staging = files.open_staging(path, "tag")
    writer = SafetensorsWriter(staging, tensors_file(0))
    chunks: dict[str, Any] = {}
    for key, value in tensors.items():
        chunks[key] = Chunks(value.shape, value.dtype)
        chunks[key].add(Box.whole(value.shape), value)
    dcp.save(chunks, storage_writer=writer, planner=SavePlanner(), no_dist=True)
    for name in (COMMON, rank_file(0)):
        with hashed_file(staging / name, writer.records) as file:
            file.write(b"")
    manifest = {"format": FORMAT, "global_steps": 1, "saved_at": 1, "ranks": 1, "files": writer.records}
    files.publish(path, "tag", manifest, latest=True)


def forge(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a checkpoint's JSON file in place, and make its manifest vouch for it."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    forge_manifest(file.parent, file)


def forge_manifest(path: Path, *changed: Path) -> None:
    """Make a manifest vouch for files as they are now."""
    manifest = read_manifest(path)
    for file in changed:
        content = file.read_bytes()
        record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][file.name] = record
    write_manifest(path, manifest)
