"""Dense tensors as the chunks of them that a rank has, in the words of PyTorch's Distributed Checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader

from sdp_deepspeed.checkpoint.state.boxes import Box


class Chunks:
    """A value of a DCP state dict: some boxes of one dense tensor, and where their elements are here.

    Args:
        shape: of the dense tensor.
        dtype: of its elements.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._parts: dict[tuple[int, ...], tuple[Box, torch.Tensor]] = {}  # by offsets

    def add(self, box: Box, values: torch.Tensor) -> None:
        """`values` has the elements of `box`, shaped like it; a view, so that loading writes to where it came from."""
        assert tuple(values.shape) == box.sizes, f"{tuple(values.shape)} is not {box.sizes}"
        self._parts[box.offsets] = box, values

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        """Values of the box that begins there."""
        return self._parts[tuple(offsets)][1]

    def items(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Boxes with their values, in the order in which they are written."""
        yield from self._parts.values()

    def boxes(self) -> list[Box]:
        """Of the chunks."""
        return [box for box, _ in self._parts.values()]

    def share(self, rank: int, size: int) -> Chunks:
        """The chunks that are for one rank of `size`."""
        part = Chunks(self.shape, self.dtype)
        part._parts = dict(list(self._parts.items())[rank::size])
        return part

    def size(self) -> torch.Size:
        """Of the dense tensor: DCP compares it with the stored one."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes()]


StateDict = dict[str, Chunks]


class SavePlanner(DefaultSavePlanner):
    """DCP's, for a flat state dict of `Chunks`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.state_dict[index.fqn].at(index.offset)

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor:
        return object.detach()


class LoadPlanner(DefaultLoadPlanner):
    """DCP's, for a flat state dict of `Chunks`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.state_dict[index.fqn].at(index.offset)


def read_chunks(targets: StateDict, reader: StorageReader) -> None:
    """Fill every chunk of `targets`; this process alone.

    Raises:
        CheckpointException: DCP's, see `translated_dcp_errors`.
    """
    if targets:
        # Safetensors gives tensors on the default device. DCP remarks that it is told not to communicate.
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
            dcp.load(dict(targets), storage_reader=reader, planner=LoadPlanner(), no_dist=True)


@contextmanager
def translated_dcp_errors(where: str) -> Iterator[None]:
    """ValueError for DCP's exception, which is no `Exception`, and shows a stack for each rank."""
    try:
        yield
    except CheckpointException as problem:
        _, (error, _) = min(problem.failures.items())
        raise ValueError(f"{where}: {error}") from error
