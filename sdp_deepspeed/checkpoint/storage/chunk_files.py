"""DCP storage in safetensors files and JSON: one file of chunks per rank, one index; nothing is pickled."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.storage.index import DTYPE_NAMES, StoredChunk, parse, render
from sdp_deepspeed.checkpoint.storage.manifest import hashed_file
from sdp_deepspeed.checkpoint.storage.names import INDEX


class SafetensorsWriter(StorageWriter):
    """Writes this rank's chunks to one file, in no more memory than one chunk.

    Args:
        folder: exists.
        file: name of this rank's file.

    Attributes:
        records: what the manifest says of the files that this rank wrote.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._folder, self._file = folder, file
        self.records: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Larger elements first, so that each chunk is aligned to its own.
        items = sorted(plan.items, key=lambda item: -_dtype_of(item).itemsize)
        results = []
        with hashed_file(self._folder / self._file, self.records) as file:
            file.write(_header(items))
            for item in items:
                data: Any = planner.resolve_data(item)
                values = _bytes(data.to("cpu"))
                file.write(values)
                results.append(WriteResult(item.index, len(values), self._file))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """One rank writes the index."""
        files = {result.index: result.storage_data for of_rank in results for result in of_rank}
        with hashed_file(self._folder / INDEX, self.records) as file:
            file.write(render(metadata.state_dict_metadata, files).encode())


def _bytes(values: torch.Tensor) -> memoryview:
    """Row-major; a view where it can be. What has one element is contiguous with whatever stride it has."""
    flat: Any = values.contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def _dtype_of(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _header(items: Sequence[WriteItem]) -> bytes:
    """Of a safetensors file: length, then names, dtypes, shapes and offsets."""
    entries: dict[str, Any] = {}
    start = 0
    for item in items:
        assert item.tensor_data is not None
        sizes, dtype = item.tensor_data.chunk.sizes, _dtype_of(item)
        stop = start + sizes.numel() * dtype.itemsize
        name = _name(item.index)
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(sizes), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _name(index: MetadataIndex) -> str:
    """Of a chunk in its file."""
    assert index.offset is not None
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


class Reader(StorageReader):
    """What no reader of ours has to do; each is made for one checkpoint."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(Reader):
    """Reads what `SafetensorsWriter`s of any number of ranks wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_metadata(self, *args: Any) -> Metadata:
        """Dense tensors by key, and in `storage_data` where each of their chunks is.

        Raises:
            ValueError: the index is not what a writer wrote: chunks are missing, overlap, or are elsewhere.
        """
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        path = self._folder / INDEX
        try:
            return parse(regular(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise ValueError(f"checkpoint: {path} cannot be read: {problem}") from problem

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks: Mapping[MetadataIndex, StoredChunk] = self._metadata.storage_data
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[chunks[item.storage_index].file].append(item)
        for name, items in by_file.items():
            with safe_open(regular(self._folder / name), framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item)
                    _refuse_other(file, item.storage_index, chunks[item.storage_index])
                    target.copy_(_read_slice(file, _name(item.storage_index), item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _refuse_other(file: Any, index: MetadataIndex, chunk: StoredChunk) -> None:
    """ValueError where a file has something else than the index says: it would be stretched or converted unseen."""
    stored = file.get_slice(_name(index))
    there = stored.get_dtype(), tuple(stored.get_shape())
    if there != (chunk.dtype, chunk.sizes):
        raise ValueError(
            f"{chunk.file} has {_name(index)} as {there[0]} {list(there[1])}, and {INDEX} says {chunk.dtype} "
            f"{list(chunk.sizes)}"
        )


def _read_slice(file: Any, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    if not lengths:
        return file.get_tensor(name)
    return file.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]
