"""Checkpoints of others as DCP storage with our keys: whole dense tensors in files; a rank reads its part."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from sdp_deepspeed.checkpoint.storage.chunk_files import Reader

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor in a file.

    Args:
        name: in the file.
        shape: of the dense tensor.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


SliceReader = Callable[[WholeTensor, Slices], torch.Tensor]


class WholeTensorsReader(Reader):
    """Reads boxes of whole tensors.

    Args:
        tensors: by our key, such as `weight/<dense name>`.
    """

    def __init__(self, tensors: Mapping[str, WholeTensor]) -> None:
        self.tensors = dict(tensors)

    @abstractmethod
    def open(self, file: Path) -> AbstractContextManager[SliceReader]:
        """A file, from which parts of its tensors can be read without reading the rest."""

    def read_metadata(self, *args: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for key, whole in self.tensors.items():
            size = torch.Size(whole.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), size, [chunk])
        return Metadata(tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self.tensors[item.storage_index.fqn].file].append(item)
        for path, items in by_file.items():
            with self.open(path) as read:
                for item in items:
                    starts, sizes = item.storage_offsets, item.lengths
                    slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                    target = planner.resolve_tensor(item)
                    target.copy_(read(self.tensors[item.storage_index.fqn], slices))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
