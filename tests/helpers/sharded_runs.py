"""A run of the FSDP2 host, with optimizer, schedule and checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import sdp_deepspeed
from sdp_deepspeed.checkpoint.files import Reader
from sdp_deepspeed.checkpoint.save_and_load import COMMON, read_bytes
from sdp_deepspeed.fsdp import CheckpointManager, param_groups, sharded_model_of
from tests.helpers.checkpointed_runs import dense_tensors
from tests.helpers.models import batches, llama, loss_of, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical


class ShardedRun:
    """
    Args:
        mesh: the data-parallel ranks; None for all.
    """

    def __init__(
        self,
        model: Any = None,
        mesh: DeviceMesh | None = None,
        *,
        kind: type[Any] = torch.optim.AdamW,
        **block: Any,
    ) -> None:
        self.model: Any = sdp_deepspeed.fully_shard(model or llama(tied=True), mesh, {"holders": 1} | block)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.optimizer = kind(param_groups(two_groups(trained)), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.checkpoints = CheckpointManager(self.model, self.optimizer, self.scheduler)

    def train(self, rank: Rank, num_steps: int, *, first: int = 0, seed: int = 1) -> list[float]:
        losses, sharded = [], sharded_model_of(self.model)
        for step in itertools.islice(batches(sharded.mesh.size(), 1, seed), first, first + num_steps):
            loss = loss_of(self.model, step[sharded.rank][0])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


HOW = ("fused", "foreach", "capturable", "differentiable")  # options that change no result


def optimizer_in(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its optimizer, but for how it steps: options and scalars by parameter."""
    found = read_bytes(Reader(folder), COMMON)["optimizer"]
    options = [{k: v for k, v in group.items() if k not in (*HOW, "initial_lr")} for group in found["options"]]
    by_name = {name: (options[group], found["scalars"][group]) for name, group in found["groups"].items()}
    return {"kind": found["kind"]} | by_name


def assert_same_run(one: Path, other: Path) -> None:
    """Dense weights, moments, counts and options."""
    assert_identical(dense_tensors(one), dense_tensors(other))
    assert optimizer_in(one) == optimizer_in(other)


def own_buffers(run: ShardedRun) -> dict[str, torch.Tensor]:
    """Those that this rank has, without tables that a model computes itself."""
    return {name: value for name, value in run.model.named_buffers() if value.numel() and "rotary" not in name}


def check_resumed(rank: Rank, folder: Path, run: ShardedRun, resumed: ShardedRun) -> None:
    """Train, save, and resume in another run: losses, weights, moments, schedule, buffers and random numbers are those
    of the uninterrupted run, bit for bit."""
    run.train(rank, 2)
    run.checkpoints.save_checkpoint(folder)
    run.checkpoints.wait_for_checkpoint()
    drawn = torch.rand(3)
    resumed.train(rank, 1, seed=7)
    resumed.checkpoints.load_checkpoint(folder)
    assert torch.equal(torch.rand(3), drawn)
    assert_identical(own_buffers(resumed), own_buffers(run))
    assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
    assert resumed.train(rank, 2, first=2) == run.train(rank, 2, first=2)
    for name, each in (("uninterrupted", run), ("resumed", resumed)):
        each.checkpoints.save_checkpoint(folder, name)
        each.checkpoints.wait_for_checkpoint()
    if rank.rank == 0:
        assert_same_run(folder / "uninterrupted", folder / "resumed")
