"""Checkpoints of models whose units are divided over tensor-parallel ranks too: the dense model's, on 2 x 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from sdp_deepspeed.fsdp import full_state_dict, save_pretrained
from tests.helpers.models import llama, scrambled
from tests.helpers.ranks import Rank
from tests.helpers.sharded_runs import ShardedRun, assert_same_run
from tests.helpers.training import assert_identical
from tests.ranks.fsdp.test_tensor_parallel import LLAMA, Tower

pytestmark = pytest.mark.world(4)


def tied(seed: int = 0) -> Any:
    """Its vocabulary is divided unevenly; its norms are no DTensors."""
    return llama(tied=True, seed=seed)


def with_buffers() -> Any:
    """Norms and some biases are DTensors that each rank has, as is the head's buffer; those of units are none."""
    model: Any = Tower()
    for inner in (model.head, *(layer.one[1] for layer in model.layers)):
        inner.register_buffer("mean", torch.zeros(3))
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    return model


def divided(model: Any, **block: Any) -> ShardedRun:
    """A run under tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    parallelize_module(model, mesh["tp"], Tower.PLAN if isinstance(model, Tower) else LLAMA)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return ShardedRun(model, mesh["dp"], **block)


def own_buffers(run: ShardedRun) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.named_buffers() if value.numel() and "rotary" not in name}


def test_goes_on_as_uninterrupted(rank: Rank) -> None:
    """Losses, weights, moments, schedule, buffers and random numbers, bit for bit."""
    for number, build in enumerate((tied, with_buffers)):
        run, folder = divided(build()), rank.folder / f"resumed{number}"
        run.train(rank, 2)
        own = own_buffers(run)
        for name in own:
            run.model.get_buffer(name).add_(rank.rank + 1)
        run.checkpoints.save_checkpoint(folder)
        drawn = torch.rand(3)
        resumed = divided(scrambled(build()))
        resumed.train(rank, 1, seed=7)
        resumed.checkpoints.load_checkpoint(folder)
        assert torch.equal(torch.rand(3), drawn)
        assert_identical(own_buffers(resumed), own_buffers(run))
        assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
        assert resumed.train(rank, 2, first=2) == run.train(rank, 2, first=2)
        run.checkpoints.save_checkpoint(folder, "uninterrupted")
        resumed.checkpoints.save_checkpoint(folder, "resumed")
        if rank.rank == 0:
            assert_same_run(folder / "uninterrupted", folder / "resumed")


def test_goes_on_elsewhere(rank: Rank) -> None:
    """Without tensor parallelism, as blocks and as neurons, and back; and from what is exported."""
    run, folder = divided(tied()), rank.folder / "elsewhere"
    run.train(rank, 2)
    run.checkpoints.save_checkpoint(folder / "divided")
    plain, neurons, back = ShardedRun(tied(5)), ShardedRun(tied(5), strategy="neuron", holders=3), divided(tied(5))
    plain.train(rank, 1, seed=7)
    carry(rank, folder / "divided", plain, folder / "plain")
    carry(rank, folder / "divided", neurons, folder / "neurons")
    assert_same_steps(run, plain)
    plain.train(rank, 1, first=2)
    plain.checkpoints.save_checkpoint(folder / "further")
    carry(rank, folder / "further", back, folder / "back")
    assert_same_steps(plain, back)
    save_pretrained(run.model, folder / "hf")
    back.checkpoints.load_pretrained(folder / "hf")
    assert_identical(full_state_dict(back.model), full_state_dict(run.model))


def carry(rank: Rank, source: Path, run: ShardedRun, target: Path) -> None:
    """Load a checkpoint, and save it again: it is the same."""
    path, _ = run.checkpoints.load_checkpoint(source)
    assert path is not None
    run.checkpoints.save_checkpoint(target, Path(path).name)
    if rank.rank == 0:
        assert_same_run(Path(path), target / Path(path).name)


def assert_same_steps(one: ShardedRun, other: ShardedRun) -> None:
    """Weights bit for bit; then, without gradients, a step that the moments and their counts decide alone."""
    assert_identical(full_state_dict(one.model), full_state_dict(other.model))
    for run in (one, other):
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.testing.assert_close(full_state_dict(one.model), full_state_dict(other.model))
