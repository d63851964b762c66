"""The index of a checkpoint: its dense tensors, the chunks that each of them was cut into, and their files."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT

# Names of safetensors' format.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_CUT_DIMS = 8  # of the corners of a box there are 2 to the power of it


class StoredChunk(NamedTuple):
    """Where a chunk is, and what its file must say of it."""

    file: str
    sizes: tuple[int, ...]
    dtype: str


def render(metadata: Mapping[str, Any], files: Mapping[MetadataIndex, str]) -> str:
    """The index as text, a line for each tensor: by lines the library works in C, with its own indents it does not.

    Args:
        metadata: DCP's, by key.
        files: names of files by chunk.
    """
    entries = ((key, _entry(key, info, files)) for key, info in sorted(metadata.items()))
    lines = (f"{json.dumps(key)}: {json.dumps(entry, sort_keys=True)}" for key, entry in entries)
    return "{\n" + ",\n".join(lines) + "\n}"


def _entry(key: str, info: Any, files: Mapping[MetadataIndex, str]) -> dict[str, Any]:
    chunks = [
        {"offsets": list(c.offsets), "sizes": list(c.sizes), "file": files[MetadataIndex(key, c.offsets)]}
        for c in info.chunks
    ]
    return {"dtype": DTYPE_NAMES[info.properties.dtype], "shape": list(info.size), "chunks": chunks}


def parse(text: str) -> Metadata:
    """DCP's description of the tensors, with a `StoredChunk` for each chunk in `storage_data`.

    Raises:
        ValueError: it is not what `render` writes: chunks that do not cover their tensor exactly once, a trained tensor
            of whole numbers, a file in another folder.
    """
    try:
        entries = json.loads(text)
    except RecursionError as problem:
        raise ValueError(f"{problem}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"it holds a {type(entries).__name__}, expected tensors by name")
    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, StoredChunk] = {}
    for key, entry in entries.items():
        try:
            tensors[key], chunks = _parse_entry(entry)
        except (KeyError, TypeError) as problem:
            raise ValueError(f"{key}: {problem!r}") from None
        except ValueError as problem:
            raise ValueError(f"{key}: {problem}") from None
        files |= {MetadataIndex(key, offsets): chunk for offsets, chunk in chunks}
    _refuse_whole_numbers(tensors)
    return Metadata(tensors, storage_data=files)


def _parse_entry(entry: Mapping[str, Any]) -> tuple[TensorStorageMetadata, list[tuple[tuple[int, ...], StoredChunk]]]:
    shape, dtype = _sizes(entry["shape"]), _DTYPES[entry["dtype"]]
    boxes = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in entry["chunks"]]
    if not covers_once(shape, boxes):
        raise ValueError(f"its {len(boxes)} chunks do not cover each element of its shape {list(shape)} exactly once")
    files = [_file_name(chunk["file"]) for chunk in entry["chunks"]]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    stored = [
        (offsets, StoredChunk(file, sizes, entry["dtype"])) for (offsets, sizes), file in zip(boxes, files, strict=True)
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks), stored


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"expected a list of sizes, got {value!r}"[:200])
    return tuple(value)


def _file_name(text: Any) -> str:
    """In the folder of the index, whose manifest vouches for it."""
    if not isinstance(text, str) or Path(text).name != text:
        raise ValueError(f"{text!r} is not the name of a file beside it")
    return text


def covers_once(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) cover each element of `shape` exactly once, and nothing beside it.

    The corners of a box with alternating signs are the mixed difference of its indicator function, from which sums give
    the function back. So the boxes' functions add up to that of the whole exactly if their corners do, which takes time
    in proportion to their number, however they are cut.
    """
    boxes, dims = list(boxes), range(len(shape))
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    cut = [dim for dim in dims if any((at[dim], sizes[dim]) != (0, shape[dim]) for at, sizes in boxes)]
    if len(cut) > _MAX_CUT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in (*((1, *box) for box in boxes), (-1, [0] * len(shape), shape)):
        if 0 in sizes:
            continue
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _refuse_whole_numbers(tensors: Mapping[str, TensorStorageMetadata]) -> None:
    """What is trained has a master, or moments: only buffers may be of whole numbers."""
    trained = {name for kind, _, name in (key.partition("/") for key in tensors) if kind != WEIGHT}
    for kind, name in itertools.product((WEIGHT, MASTER), trained):
        info = tensors.get(f"{kind}/{name}")
        if info is not None and not info.properties.dtype.is_floating_point:
            raise ValueError(f"{kind}/{name} is trained and of {info.properties.dtype}, expected floating point")
