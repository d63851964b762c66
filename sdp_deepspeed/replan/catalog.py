"""What there is before a re-plan: what this rank has of weights, masters and moments, and which rank sends what.

Everything is in the dense model's coordinates, as in a checkpoint: a key for each tensor, and boxes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.distributed.agreement import Gatherer

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
        for piece, box, values in rank_chunks.stored_weights():
            if own_buffers or rank_chunks.tensors[piece.parameter].kind == "parameter":
                local.setdefault(f"{WEIGHT}/{piece.parameter}", []).append((box, values))
        for state in (optimizer.stepped(), owned):
            for key, chunks in state.items():
                local.setdefault(key, []).extend(chunks.items())
        return cls(owned, local)


@dataclass(frozen=True)
class Catalog:
    """What all ranks send, the same on every rank.

    Args:
        shapes, dtypes: of the dense tensors, by key.
        owners: by key the ranks with their boxes, which together are the whole tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    owners: Mapping[str, list[tuple[int, Box]]]

    @classmethod
    def gather(cls, owned: StateDict, ranks: Gatherer) -> Catalog:
        """Every rank calls it with what it sends."""
        own = {key: (tuple(chunks.shape), chunks.dtype, chunks.boxes()) for key, chunks in owned.items()}
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        owners: dict[str, list[tuple[int, Box]]] = {}
        for rank, of_rank in enumerate(ranks.gather_objects(own)):
            for key, (shape, dtype, boxes) in of_rank.items():
                shapes[key], dtypes[key] = shape, dtype
                owners.setdefault(key, []).extend((rank, box) for box in boxes)
        return cls(shapes, dtypes, owners)

    def metadata(self) -> Metadata:
        """As that of a checkpoint which has all of it."""
        return Metadata(
            {
                key: TensorStorageMetadata(TensorProperties(dtype=self.dtypes[key]), torch.Size(shape), [])
                for key, shape in self.shapes.items()
            }
        )

    def gaps(self) -> Iterator[str]:
        """Keys of which nobody would send some elements, or two ranks would."""
        for key, shape in self.shapes.items():
            if sum(box.num_elements for _, box in self.owners[key]) != torch.Size(shape).numel():
                yield key
