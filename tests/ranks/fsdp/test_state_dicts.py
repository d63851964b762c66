"""PyTorch's Distributed Checkpoint (DCP) over sharded models, in torchtitan's pattern, and what it is not for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import sdp_deepspeed
from sdp_deepspeed.fsdp import clip_grad_norm_, full_state_dict, param_groups, sharded_model_of
from sdp_deepspeed.fsdp.state_dicts import AbsentTensor
from tests.helpers.models import batches, llama, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.sharded import gathered_state
from tests.helpers.training import assert_identical, refusal

pytestmark = pytest.mark.world(4)
NEURON = {"holders": 2, "strategy": "neuron"}
BLOCKS: dict[str, dict[str, Any]] = {
    "block": {"holders": 2},
    "neuron": NEURON,
    "replicas": {"holders": 1, "subnetworks": 2, "strategy": "neuron"},
}


# The state of the optimizer by the names of parameters: ranks have different param groups.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class TrainState(Stateful):
    """What DCP saves and loads, as torchtitan has it."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer, self.step = (state_dict[name] for name in ("model", "optimizer", "step"))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=BY_NAME)


def started(block: dict[str, Any], *, seed: int = 0) -> Any:
    """Of a model whose buffers are of units and of what is shared."""
    model: Any = llama(tied=True, seed=seed)
    for module in (model, model.model.layers[0].mlp if "strategy" not in block else model.model.norm):
        module.register_buffer("seen", torch.zeros(2))
    model = sdp_deepspeed.fully_shard(model, None, block)
    return TrainState(model, torch.optim.AdamW(param_groups(model), lr=1e-2))


def trained(state: Any, rank: Rank, num_steps: int) -> list[float]:
    losses = []
    for step in itertools.islice(batches(rank.size, 1), state.step, state.step + num_steps):
        loss = loss_of(state.model, step[rank.rank][0])
        loss.backward()
        clip_grad_norm_(state.model, 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(loss.item())
    state.step += num_steps
    return losses


@pytest.mark.parametrize("name", ["neuron", *(pytest.param(n, marks=pytest.mark.slow) for n in ("block", "replicas"))])
def test_goes_on(rank: Rank, name: str) -> None:
    """Losses and weights of a resumed run are those of the uninterrupted one, bit for bit."""
    state, folder = started(BLOCKS[name]), rank.folder / name
    trained(state, rank, 2)
    for buffer in (buffer for key, buffer in state.model.named_buffers() if key.endswith("seen")):
        buffer.fill_(7.0)
    if name == "neuron":
        saving: Any = dcp.async_save({"train": state}, checkpoint_id=folder / "step-10")
        saving.result()
    else:
        dcp.save({"train": state}, checkpoint_id=folder / "step-10")
    saved = full_state_dict(state.model)
    expected = trained(state, rank, 2)
    resumed = started(BLOCKS[name], seed=5)
    for number, content in ((9, ".metadata"), (11, "__0_0.distcp")):  # an older one, and one that is not complete
        (folder / f"step-{number}").mkdir(exist_ok=True)
        (folder / f"step-{number}" / content).touch()
    dcp.load({"train": resumed}, checkpoint_id=folder / "step-10")
    assert_identical(full_state_dict(resumed.model), saved)
    assert trained(resumed, rank, 2) == expected
    assert_identical(full_state_dict(resumed.model), full_state_dict(state.model))


def test_another_plan_is_refused(rank: Rank) -> None:
    """Pieces would be taken for others of the same names."""
    first = started(NEURON)
    plan = sharded_model_of(first.model).plan
    turned = [number for number, unit in enumerate(plan.units) if unit.name.startswith("model.layers.0.mlp")]
    holders = dict(zip(turned, [plan.holders[number] for number in reversed(turned)], strict=True))
    path = rank.folder / f"{rank.rank}.json"
    replace(plan, holders=tuple(holders.get(number, own) for number, own in enumerate(plan.holders))).save(path)
    second = started({"strategy": "neuron", "assignment": str(path)})
    dcp.save({"train": first}, checkpoint_id=rank.folder / "pieces")
    load = partial(dcp.load, {"train": second}, checkpoint_id=rank.folder / "pieces")
    refusal(CheckpointException, load, "Missing key")


def test_is_no_whole_model(rank: Rank) -> None:
    """What each rank has of it is for DCP; every other way to save it is refused on each rank."""
    for name in ("block", "neuron"):
        model = started(BLOCKS[name]).model
        words = ("torch.distributed.checkpoint", "full_state_dict")
        refusal(RuntimeError, lambda model=model: torch.save(model.state_dict(), rank.folder / f"{rank.rank}"), *words)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # as far as it goes
        refusal(RuntimeError, lambda full=full: torch.save(full, rank.folder / f"{rank.rank}"), *words)
        refusal(RuntimeError, lambda full=full: safetensors.torch.save(full), *words)
    state = started(BLOCKS["block"]).model.state_dict()
    absent = next(value for value in state.values() if isinstance(value, AbsentTensor))
    for use in (absent.numpy, absent.clone, absent.sum, lambda: absent + 1, lambda: torch.cat([absent])):
        refusal(RuntimeError, use, "this rank lacks model.layers.")


def test_takes_the_dense_model(rank: Rank) -> None:
    """Of blocks each rank takes what it holds; a tensor of another shape is refused."""
    dense, model = llama(seed=5).state_dict(), sdp_deepspeed.fully_shard(llama(), None, {"holders": 2})
    set_model_state_dict(model, dict(dense), options=StateDictOptions(full_state_dict=True))
    assert_identical(gathered_state(model), dense)
    dense["model.layers.0.mlp.up_proj.weight"] = dense["model.layers.0.mlp.down_proj.weight"]
    wrong = partial(set_model_state_dict, model, dense, options=StateDictOptions(full_state_dict=True))
    refusal((RuntimeError, ValueError), wrong, "up_proj")
