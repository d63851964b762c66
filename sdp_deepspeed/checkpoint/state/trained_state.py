"""What checkpoints save and restore: the engine, as far as they need to know it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import Shards


class TrainedState(Protocol):
    """A model in training, on one rank.

    Attributes:
        config: DeepSpeed's, as the user gave it.
        world: all ranks; all call what saves or loads.
    """

    module: nn.Module
    optimizer: SubnetworkOptimizer
    lr_scheduler: Any
    config: Any
    world: Communicator
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int

    @property
    def plan(self) -> Plan:
        """Who holds what, in the dense model's coordinates."""

    @property
    def shards(self) -> Shards:
        """What this rank stores under tensor parallelism."""

    def rank_chunks(self) -> RankChunks:
        """Where this rank's parameters and persistent buffers lie in the dense model."""

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
