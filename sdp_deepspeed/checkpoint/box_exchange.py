"""Put dense tensors together outside a step: boxes that ranks want, from boxes that ranks offer.

Re-plans and exports of FSDP2 use it; each rank receives only the elements that it wants. Dense views, in which all
ranks want nearly everything, have an all-gather (parallel/dense_gathers.py): here a holder would send a slice once for
each rank that lacks it, with 64 ranks and blocks at C = 1/2 14 times as many bytes as the all-gather.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from sdp_deepspeed.checkpoint.dcp_planners import LoadPlanner, State
from sdp_deepspeed.parallel.consistency import gather_objects, run_on_all_ranks

_BYTES = 2**28  # of dense tensors per exchange


class BoxDirectory:
    """Directory of the boxes of all ranks. The constructor is collective.

    Args:
        state: boxes of this rank, disjoint from those of other ranks.

    Attributes:
        metadata: DCP's metadata, as in a checkpoint.
        owner: rank that has a box, by (key, offsets).
    """

    def __init__(self, state: State, control: dist.ProcessGroup) -> None:
        self.control = control
        self.owner: dict[tuple[str, torch.Size], int] = {}
        tensors: dict[str, Any] = {}
        mine = []
        for key, boxes in state.items():
            places = [(tuple(offsets), tuple(values.shape)) for offsets, values in boxes.parts.items()]
            mine.append((key, tuple(boxes.shape), boxes.dtype, places))
        for rank, of_rank in enumerate(gather_objects(mine, control)):
            for key, shape, dtype, places in of_rank:
                info = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), []))
                for offsets, sizes in places:
                    info.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                    self.owner[key, torch.Size(offsets)] = rank
        self.metadata = Metadata(tensors)


@torch.no_grad()
def fill(wanted: State, offered: State, directory: BoxDirectory, device: torch.device) -> int:
    """Fill boxes of this rank from those of all ranks; collective.

    Args:
        wanted: boxes to fill; may be empty.
        offered: boxes of this rank, with which `directory` was constructed.

    Returns:
        Number of bytes that this rank has sent.

    Raises:
        ValueError: on all ranks, if no rank has the wanted elements.
    """
    size, me = dist.get_world_size(), dist.get_rank()
    planner = LoadPlanner()
    planner.set_up_planner(wanted, directory.metadata)
    items = run_on_all_ranks(planner.create_local_plan, directory.control).items
    asked: list[list[ReadItem]] = [[] for _ in range(size)]  # requests of this rank, by owner
    for item in sorted(items, key=lambda item: item.storage_index.fqn):
        asked[directory.owner[item.storage_index.fqn, _offset(item.storage_index)]].append(item)
    asks = _exchanged(asked, directory.control)  # requests to this rank, by requesting rank
    sent = 0
    for keys, dtype in _batches(directory.metadata):
        leaving, out_sizes = _of_keys(asks, keys)
        arriving, in_sizes = _of_keys(asked, keys)
        packed = torch.empty(sum(out_sizes), dtype=dtype, device=device)
        for item, place in zip(leaving, packed.split([item.lengths.numel() for item in leaving]), strict=True):
            place.view(item.lengths).copy_(_values(offered, item))
        received = torch.empty(sum(in_sizes), dtype=dtype, device=device)
        dist.all_to_all_single(received, packed, in_sizes, out_sizes)
        for item, values in zip(arriving, received.split([item.lengths.numel() for item in arriving]), strict=True):
            planner.resolve_tensor(item).copy_(values.view(item.lengths))
        sent += (packed.numel() - out_sizes[me]) * packed.itemsize
    return sent


def _of_keys(items: Sequence[Sequence[ReadItem]], keys: Collection[str]) -> tuple[list[ReadItem], list[int]]:
    """The items of some keys, in the order of ranks, and their number of elements by rank."""
    selected, sizes = [], []
    for of_rank in items:
        of_keys = [item for item in of_rank if item.storage_index.fqn in keys]
        selected += of_keys
        sizes.append(sum(item.lengths.numel() for item in of_keys))
    return selected, sizes


def _offset(index: MetadataIndex) -> torch.Size:
    assert index.offset is not None
    return index.offset


def _exchanged(asked: list[list[ReadItem]], control: dist.ProcessGroup) -> list[list[ReadItem]]:
    """Exchange requests. Returns the requests of each rank to this one."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(of_rank)), dtype=torch.uint8) for of_rank in asked]
    out_sizes = torch.tensor([part.numel() for part in sent], device="cpu")
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=control)
    sizes = in_sizes.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    dist.all_to_all_single(received, torch.cat(sent), sizes, out_sizes.tolist(), group=control)
    return [pickle.loads(part.numpy().tobytes()) for part in received.split(sizes)]


def _batches(metadata: Metadata) -> Iterator[tuple[set[str], torch.dtype]]:
    """Yield batches of keys with one dtype, the same on all ranks."""
    of_dtype: dict[Any, list[str]] = {}
    tensors: dict[str, Any] = metadata.state_dict_metadata
    for key in sorted(tensors):
        of_dtype.setdefault(tensors[key].properties.dtype, []).append(key)
    for dtype, keys in of_dtype.items():
        batch: set[str] = set()
        num_bytes = 0
        for key in keys:
            size = tensors[key].size.numel() * dtype.itemsize
            if batch and num_bytes + size > _BYTES:
                yield batch, dtype
                batch, num_bytes = set(), 0
            batch.add(key)
            num_bytes += size
        if batch:
            yield batch, dtype


def _values(offered: State, item: ReadItem) -> torch.Tensor:
    box = offered[item.storage_index.fqn].parts[_offset(item.storage_index)]
    return box[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
