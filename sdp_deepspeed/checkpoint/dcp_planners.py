"""How `torch.distributed.checkpoint` (DCP) saves and loads boxes of dense tensors.

A shard is a flat range of a slice's elements in row-major order, which corresponds to a few boxes of the dense tensor.
DCP keys its chunks by boxes, so a checkpoint is independent of the layout that saved it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Boxes:
    """Boxes of a dense tensor, with their elements on this rank. DCP treats it as a sharded tensor.

    Args:
        parts: tensor in the shape of the box, by offsets of the box.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: dict[torch.Size, torch.Tensor] = field(default_factory=dict)

    def size(self) -> torch.Size:
        """Shape of the dense tensor, which DCP compares with the stored one."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, values.shape) for offsets, values in self.parts.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


State = dict[str, Boxes]


def add_box(state: State, key: str, shape: Sequence[int], offsets: Sequence[int], values: torch.Tensor) -> None:
    """Add a box of a dense tensor of `shape` to `state[key]`, unless it is empty."""
    if values.numel():
        state.setdefault(key, Boxes(torch.Size(shape), values.dtype)).parts[torch.Size(offsets)] = values


def on_host(state: State) -> State:
    """Copy all boxes to host memory."""
    result: State = {}
    for key, boxes in state.items():
        parts = {offsets: values.to("cpu", copy=True) for offsets, values in boxes.parts.items()}
        result[key] = Boxes(boxes.shape, boxes.dtype, parts)
    return result


class SavePlanner(DefaultSavePlanner):
    """DCP's planner for `Boxes`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].parts[index.offset]


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for `Boxes`, without pickles."""

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = dict(state_dict), metadata, is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> LoadPlan:
        """See DCP.

        Raises:
            ValueError: the checkpoint lacks elements; DCP itself would leave these unchanged.
        """
        plan = super().create_local_plan()
        planned: dict[str, int] = {}  # elements by key
        for item in plan.items:
            planned[item.dest_index.fqn] = planned.get(item.dest_index.fqn, 0) + item.lengths.numel()
        for key, boxes in self.state_dict.items():
            wanted = sum(values.numel() for values in boxes.parts.values())
            if planned.get(key, 0) != wanted:
                raise ValueError(f"{key!r}: the checkpoint has {planned.get(key, 0)} of the {wanted} elements needed")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].parts[index.offset]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.storage_index.fqn!r} is stored as a pickle; expected a tensor")
