"""What checkpoints save and restore, as far as they need to know it: a model in training, whatever its host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo


class WeightChunks(Protocol):
    """Where one rank's tensors lie in the dense model."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of the dense model, those that this rank lacks too: parameters and persistent buffers, by dense name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the dense tensor."""

    def stored_weights(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """All that this rank stores: dense name, where it lies in the dense tensor, and its live values."""

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this rank stores, on the host; each rank's own, but for statistics of batch norms."""

    def restore_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `own_buffers`."""


class OptimizerChunks(Protocol):
    """What one rank's optimizer keeps, in the dense model's coordinates."""

    def counts(self) -> Any:
        """What other ranks must know of this one's for `metadata`: step counts; small and picklable."""

    def metadata(self, counts: Sequence[Any]) -> dict[str, Any]:
        """All but the tensors of elements, the same on every rank: plain values.

        Args:
            counts: of all ranks.

        Returns:
            `groups` (number of the param group by dense name), `options` and `counts` of each group, `kind` of the
            optimizer, `loss_scaler` (numbers, maybe none).
        """

    def written(self, *, exclude_frozen: bool) -> StateDict:
        """Weights, masters and moments that this rank writes: each element of the dense model is written by one rank.

        Args:
            exclude_frozen: leave out parameters that need no gradients.
        """

    def master_targets(self, stored: Mapping[str, Any]) -> StateDict:
        """Where fp32 masters are loaded to, from stored masters or else from weights.

        Args:
            stored: keys of the checkpoint.
        """

    def new_moments(self, stored: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[StateDict, dict[str, Any]]:
        """Where moments are loaded to, and the state for `restore` that has them.

        Args:
            stored: DCP's metadata of what the checkpoint has, by key.
            metadata: of the run that wrote it.

        Raises:
            ValueError: the optimizer here cannot go on with it.
        """

    def restore(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Take what `new_moments` made, once it is filled."""


@dataclass(frozen=True)
class RankState:
    """What one rank has of the dense model in training."""

    weights: WeightChunks
    optimizer: OptimizerChunks


class Stepping(Protocol):
    """An optimizer as its host shows it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """With their options."""

    def zero_grad(self) -> None:
        """Drop all gradients."""


class TrainedState(Protocol):
    """A model in training, on one rank.

    Attributes:
        config: the host's, as the user gave it.
        world: all ranks; all call what saves or loads.
    """

    module: nn.Module
    lr_scheduler: Any
    config: Any
    world: Communicator
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int

    @property
    def optimizer(self) -> Stepping:
        """The one that steps."""

    @property
    def plan(self) -> Plan:
        """Who holds what, in the dense model's coordinates."""

    @property
    def tensor_parallel_layout(self) -> int | list[list[int]]:
        """Ranks of a tensor-parallel group, 1 without; or which ranks are where, if not in the usual order."""

    def rank_state(self) -> RankState:
        """Where this rank's parameters, persistent buffers and optimizer state lie in the dense model."""

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of one step."""

    def before_restore(self, steps: int) -> None:
        """A checkpoint of so many steps comes next; every rank calls it."""

    def before_checkpoint(self, call: str) -> None:
        """Meet all ranks, and leave evaluation.

        Raises:
            RuntimeError: a rank does not come, which is named; or the dense model is resident, in which `call` is not
                possible.
        """

    def log_on_rank_0(self, text: str, level: int) -> None:
        """Tell the user, by a level of `logging`; other ranks say nothing."""
