"""Checkpoints of models whose units are divided over tensor-parallel ranks too: the dense model's, on 2 x 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint.saved_tensors import written_state
from sdp_deepspeed.fsdp import full_state_dict, save_pretrained, sharded_model_of
from sdp_deepspeed.fsdp.checkpoint_manager import state_of
from sdp_deepspeed.plan.tensors import named_tensors
from tests.helpers.checkpointed_runs import dense_of
from tests.helpers.models import llama, scrambled
from tests.helpers.ranks import Rank
from tests.helpers.sharded_runs import ShardedRun, assert_same_run
from tests.helpers.training import assert_identical, gathered
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


def divided(model: Any, *, axes: tuple[str, str] = ("dp", "tp"), **block: Any) -> ShardedRun:
    """A run under tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
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


@pytest.mark.slow
def test_goes_on_elsewhere(rank: Rank) -> None:
    """Without tensor parallelism, as blocks and as neurons, and back."""
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


def carry(rank: Rank, source: Path, run: Any, target: Path) -> None:
    """Load a checkpoint, and save it again: it is the same."""
    saves = getattr(run, "checkpoints", run)
    path, _ = saves.load_checkpoint(str(source))
    saves.save_checkpoint(str(target), Path(path).name)
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


def test_writes_each_element_once(rank: Rank) -> None:
    """Moments too; what each tensor-parallel rank has is written by one, and not always by the same."""
    for build in (tied, with_buffers):
        run = divided(build())
        run.train(rank, 1)
        sharded = sharded_model_of(run.model)
        written = written_state(state_of(sharded, run.optimizer))
        states, state, names = gathered(written), full_state_dict(run.model), persistent(build())
        if rank.rank == 0:
            dense = dense_of(states)
            weights = {key: value for key, value in dense.items() if key.startswith("weight/")}
            assert_identical(weights, {f"weight/{name}": state[name] for name in names})
            trained = dict(build().named_parameters())
            moments = {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in trained}
            assert dense.keys() - weights.keys() == moments
            assert sum(any("norm" in key for key in of_rank) for of_rank in states) > 1


def persistent(model: nn.Module) -> set[str]:
    """Names of what is saved, once where weights are tied."""
    return named_tensors(model).keys() & model.state_dict().keys()


def test_is_another_layout(rank: Rank) -> None:
    """Where the axes of the mesh change places: other ranks have other units."""
    run, other, folder = divided(tied()), divided(tied(5), axes=("tp", "dp")), rank.folder / "layout"
    run.checkpoints.save_checkpoint(folder)
    state = torch.get_rng_state()
    torch.rand(1)
    carry(rank, folder, other, rank.folder / "again")
    assert not torch.equal(torch.get_rng_state(), state)
    run.checkpoints.load_checkpoint(folder)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_from_hugging_face(rank: Rank) -> None:
    """What is exported is the dense model, and every rank takes its part of it."""
    run, other, folder = divided(tied()), divided(tied(5)), rank.folder / "hf"
    run.train(rank, 1)
    save_pretrained(run.model, folder)
    state = full_state_dict(run.model)
    other.checkpoints.load_pretrained(folder)
    assert_identical(full_state_dict(other.model), state)
    if rank.rank == 0:
        assert_identical(AutoModelForCausalLM.from_pretrained(folder).state_dict(), state)
