"""What checkpoints save, on one rank and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from torch import nn

from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from sdp_deepspeed.checkpoint.save import Saver
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, persistent_buffers
from sdp_deepspeed.checkpoint.state.trained_state import RankState
from sdp_deepspeed.config import CheckpointOptions
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.folder_lock import LOCK
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, named_tensors
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.gatherers import Alone
from tests.helpers.rank_models import wrapped

SHAPE = (3, 5)


class Counted(nn.Module):
    """Two matrices, one of them in two units by rows, and a buffer that counts the steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.cut = nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
        self.shared = nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
        self.register_buffer("num_seen", torch.zeros(1))


@dataclass
class Trained:
    """A `TrainedState`."""

    module: nn.Module
    optimizer: SubnetworkOptimizer
    world: Communicator
    lr_scheduler: Any = None
    config: Any = field(default_factory=dict)
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0
    calls: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.optimizer.model.plan

    @property
    def tensor_parallel_layout(self) -> int:
        return self.optimizer.model.shards.size

    def rank_chunks(self) -> RankChunks:
        return RankChunks(self.optimizer.model, persistent_buffers(self.module, {"num_seen": (1,)}))

    def rank_state(self) -> RankState:
        return RankState(self.rank_chunks(), OptimizerState(self.optimizer, self.rank_chunks()))

    def log_on_rank_0(self, text: str, level: int) -> None:
        self.told.append(text)

    def gradient_accumulation_steps(self) -> int:
        return 2

    def before_restore(self, steps: int) -> None:
        self.calls.append(f"before_restore({steps})")

    def before_checkpoint(self, call: str) -> None:
        self.calls.append(call)

    def step(self) -> None:
        loss = sum((parameter.float() - 1).square().sum() for parameter in self.module.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        self.optimizer.end_backward()
        self.optimizer.step()
        self.module.get_buffer("num_seen").add_(1)
        self.global_steps += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of weights, buffers, masters, moments and step counts."""
        result = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        inner = self.optimizer.optimizer
        for index, tensor in enumerate(tensor for group in inner.param_groups for tensor in group["params"]):
            result[f"stepped.{index}"] = tensor.detach().clone()
            result |= {f"{key}.{index}": value.clone() for key, value in inner.state[tensor].items()}
        return result


def one_rank(
    *,
    dtype: torch.dtype = torch.float32,
    stage: int = 1,
    kind: type[torch.optim.Optimizer] = torch.optim.Adam,
    rows: Sequence[int] = (1, 2),
) -> Trained:
    """One that has not been trained.

    Args:
        rows: of the units of `cut`.
    """
    module = Counted(dtype)
    parameters = dict(module.named_parameters())
    starts = [sum(rows[:index]) for index in range(len(rows))]
    pieces = [Piece("cut", 0, start, length) for start, length in zip(starts, rows, strict=True)]
    units = tuple(Unit(f"unit_{index}", (piece,)) for index, piece in enumerate(pieces))
    world = Communicator(Alone())
    plan = Plan("forward", "block", 1, 1, 0, units, tuple((0,) for _ in units), (0,))
    tensors = tuple(TensorInfo(name, SHAPE, dtype) for name in parameters)
    settings = OptimizerSettings(stage, clip=0.0, bucket_elements=100, wire_dtype=dtype)
    inner = kind(parameters.values(), lr=0.1)  # type: ignore[call-arg]
    views = PieceViews(named_tensors(module))
    return Trained(module, wrapped(inner, RankModel(plan, tensors, views), world, settings=settings), world)


def checkpointer_of(trained: Trained, **options: Any) -> Checkpointer:
    saver = Saver(trained.world, None, trained.told.append)
    return Checkpointer(trained, saver=saver, options=CheckpointOptions(**options), accepts_universal=False)


def names_in(folder: Path) -> list[str]:
    """All but the lock, which is there while the process is."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)
