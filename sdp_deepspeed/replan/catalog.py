"""What there is before a re-plan: what this rank has of weights, masters and moments, and which rank sends what.

Everything is in the dense model's coordinates, as in a checkpoint: a key for each tensor, and boxes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.plan.shards import Shards
from sdp_deepspeed.replan.requests import IntArray, small

Part = tuple[Box, torch.Tensor]
"""A box of a dense tensor, and its values here."""


@dataclass(frozen=True)
class OwnState:
    """What this rank has; views of live tensors, which they keep.

    Args:
        owned: what others get from it: of each element of the dense model one rank has it among these.
        local: all that is as good as what others would send, by key; boxes may overlap.
    """

    owned: StateDict
    local: Mapping[str, list[Part]]

    @classmethod
    def of(cls, rank_chunks: RankChunks, optimizer: OptimizerState, *, own_buffers: bool) -> OwnState:
        """
        Args:
            own_buffers: whether each rank goes on with its own, as a checkpoint has it where the plan stays the same;
                else all take those of the one that would write them.
        """
        fragments = [fragment for of_group in optimizer.owned_fragments() for fragment in of_group]
        owned = rank_chunks.owned_weights(fragments) | optimizer.owned()
        local: dict[str, list[Part]] = {}
        for name, box, values in rank_chunks.stored_weights():
            if own_buffers or rank_chunks.tensors[name].kind == "parameter":
                local.setdefault(f"{WEIGHT}/{name}", []).append((box, values))
        for state in (optimizer.stepped(), owned):
            for key, chunks in state.items():
                local.setdefault(key, []).extend(chunks.items())
        return cls(owned, local)


class Owners:
    """Boxes of one dense tensor, or of several that are cut alike, and the rank that has each.

    Args:
        ranks: [number of boxes].
        boxes: offsets, then sizes [number of boxes, 2 * dims].
    """

    def __init__(self, ranks: IntArray, boxes: IntArray) -> None:
        num_dims = boxes.shape[1] // 2
        self._ranks, self._boxes = ranks, boxes
        self._starts, self._stops = boxes[:, :num_dims], boxes[:, :num_dims] + boxes[:, num_dims:]

    @property
    def num_elements(self) -> int:
        return int(self._boxes[:, self._starts.shape[1] :].prod(axis=1).sum())

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Those that have some of a box."""
        starts, stops = np.array(box.offsets, np.int64), np.array(box.offsets, np.int64) + np.array(box.sizes, np.int64)
        for index in np.flatnonzero(((self._starts < stops) & (starts < self._stops)).all(axis=1)).tolist():
            yield int(self._ranks[index]), _box(self._boxes[index].tolist())


@dataclass(frozen=True)
class Catalog:
    """What all data-parallel ranks send, the same on each of them.

    Args:
        shapes, dtypes: of the dense tensors, by key.
        owners: by key the ranks with their boxes, which together are the whole tensor, or what this rank of a
            tensor-parallel group has of it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    owners: Mapping[str, Owners]

    @classmethod
    def gather(cls, owned: StateDict, ranks: Gatherer) -> Catalog:
        """Every data-parallel rank calls it with what it sends."""
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        parts: dict[str, list[tuple[int, int]]] = {}  # by key: a rank, and the number of its boxes
        boxes: list[list[IntArray]] = []
        for rank, of_rank in enumerate(ranks.gather_objects(_packed(owned))):
            boxes.append([alike.boxes.astype(np.int64) for alike in of_rank])
            for number, alike in enumerate(of_rank):
                for key, shape, dtype in alike.tensors:
                    shapes[key], dtypes[key] = shape, dtype
                    parts.setdefault(key, []).append((rank, number))
        owners: dict[tuple[tuple[int, int], ...], Owners] = {}
        for where in map(tuple, parts.values()):
            if where not in owners:
                found = [boxes[rank][number] for rank, number in where]
                of_ranks = np.repeat([rank for rank, _ in where], list(map(len, found)))
                owners[where] = Owners(of_ranks, np.concatenate(found))
        return cls(shapes, dtypes, {key: owners[tuple(where)] for key, where in parts.items()})

    def metadata(self) -> Metadata:
        """As that of a checkpoint which has all of it."""
        return Metadata(
            {
                key: TensorStorageMetadata(TensorProperties(dtype=self.dtypes[key]), torch.Size(shape), [])
                for key, shape in self.shapes.items()
            }
        )

    def gaps(self, shards: Shards) -> Iterator[str]:
        """Keys of which ranks together would send more elements than there are, or fewer.

        Args:
            shards: what the ranks have of each tensor.
        """
        for key, shape in self.shapes.items():
            division = shards.divisions.get(key.partition("/")[2])
            size = torch.Size(shape).numel() if division is None else division.num_elements(shards.index)
            if self.owners[key].num_elements != size:
                yield key


@dataclass(frozen=True)
class _CutAlike:
    """Tensors of which one rank sends the same boxes: a weight, its master and its moments.

    Args:
        boxes: as `Owners.boxes`, in a smaller type.
        tensors: key, shape and dtype.
    """

    boxes: npt.NDArray[Any]
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]]


def _packed(owned: StateDict) -> list[_CutAlike]:
    """What one rank sends, as numbers: boxes as Python's objects would take hundreds of bytes each."""
    alike: dict[tuple[Box, ...] | int, _CutAlike] = {}
    for key, chunks in owned.items():
        boxes, width = tuple(chunks.boxes()), 2 * len(chunks.shape)
        numbers = np.array([(*box.offsets, *box.sizes) for box in boxes], np.int64).reshape(len(boxes), width)
        same = alike.setdefault(boxes or width, _CutAlike(small(numbers), []))
        same.tensors.append((key, tuple(chunks.shape), chunks.dtype))
    return list(alike.values())


def _box(numbers: Sequence[int]) -> Box:
    num_dims = len(numbers) // 2
    return Box(tuple(numbers[:num_dims]), tuple(numbers[num_dims:]))
