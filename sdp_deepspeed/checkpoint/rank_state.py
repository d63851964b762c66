"""The state of one rank that checkpoints and re-planning read and write, on either host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.parallel.boxes import Box, box_of_piece
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.plan.tensor_parallel_shards import UNDIVIDED, TensorParallelShards
from sdp_deepspeed.plan.tensors import persistent_buffers

WEIGHT = "weight"  # kind of key, see saved_tensors.py


class SteppedModel(Protocol):
    """Interface of sharded optimizers (`ShardedOptimizer`, or FSDP2's) that checkpoints use."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def param_group_of(self) -> Mapping[str, int]: ...

    def boxes(self) -> Sequence[Box]: ...

    def gather_weights(self) -> None: ...


@dataclass(frozen=True)
class RankState:
    """Model and optimizer state of one rank.

    Args:
        shards: the part of each dense tensor that this tensor-parallel rank has.
    """

    mask: Mask
    optimizer: SteppedModel
    groups: Groups
    shards: TensorParallelShards = UNDIVIDED

    @property
    def model(self) -> torch.nn.Module:
        """The module, of the class that exports record."""
        return self.mask.model

    @property
    def group_numbers(self) -> list[int]:
        """Number of each param group; with FSDP2 several groups may have the same number."""
        return list(range(len(self.optimizer.optimizer.param_groups)))

    def boxes(self) -> Iterator[Box]:
        """Yield all that this rank stores of the model, once: masters of what it steps, untrained parameters, and
        persistent buffers."""
        yield from self.optimizer.boxes()
        for name, tensor in self.unstepped().items():
            for piece, holders in self.mask.pieces_of(name):
                if self.mask.is_stored(piece):
                    values = self.mask.view_in(piece, tensor)
                    yield box_of_piece(piece, values, is_written=holders[0] == self.mask.rank)

    def unstepped(self) -> dict[str, torch.Tensor]:
        """Untrained parameters and persistent buffers by dense name."""
        frozen = {name: p for name, p in self.mask.parameters.items() if name not in self.optimizer.param_group_of}
        return frozen | self.live_buffers()

    def live_buffers(self) -> dict[str, torch.Tensor]:
        """Current persistent buffers by name; modules may have replaced them."""
        persistent = persistent_buffers(self.model)
        return {name: buffer for name, buffer in self.current_buffers().items() if name in persistent}

    def current_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of this rank by dense name."""
        return dict(self.mask.model.named_buffers())

    @property
    def layout(self) -> dict[str, Any]:
        """The layout. If it is unchanged on load, each rank restores its own random state and buffers."""
        plan = self.mask.plan
        return {
            "plan": plan.hash,
            "subnetwork_of_rank": list(plan.subnetwork_of_rank),
            "ranks": self.groups.ranks,
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the dense model."""
        division = self.shards.divisions.get(name)
        return tuple(self.mask.shapes[name] if division is None else division.shape)

    def writes(self, name: str) -> bool:
        """Whether this tensor-parallel rank saves its part; of undivided tensors only the first rank does."""
        return name in self.shards.divisions or self.groups.tensor_parallel_rank == 0

    def offsets(self, box: Box) -> list[int]:
        """Offsets of a box in the tensor of the dense model."""
        offsets = list(box.offsets)
        if (division := self.shards.divisions.get(box.name)) is not None:
            offsets[division.dim] += sum(division.lengths[: self.shards.index])
        return offsets


def buffers_of_rank(state: RankState) -> dict[str, torch.Tensor]:
    """This rank's persistent buffers, whose values may differ between ranks, by name and start of each slice."""
    boxes = [box for box in state.boxes() if box.name in state.mask.buffers]
    return {f"{box.name}@{sum(box.offsets)}": box.view() for box in boxes}


def restore_buffers(state: RankState, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `buffers_of_rank`."""
    for key, values in buffers_of_rank(state).items():
        values.copy_(buffers[key])
