"""Models that an engine cannot train as they are: one error on all ranks, before anything is broadcast."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.config import MODES
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)


def test_a_model_that_was_cut_before(rank: Rank) -> None:
    """It is made whole, as the earlier engine left it, and cut anew; a part of it, or a copy, is refused."""
    for first, second in (({"holders": 1}, {"holders": 1, "strategy": "neuron"}), ({"holders": 2}, {"holders": 1})):
        model = llama()
        engine = engine_of(config(**first), model)
        train(engine, num_steps=1)
        whole = dense_state(engine)
        if first["holders"] == 1:
            refusal(ValueError, lambda m=model: engine_of(config(holders=1), deepcopy(m)), "an earlier engine reduced")
        again, fresh = engine_of(config(**second), model), llama()
        assert_identical(dense_state(again), whole)
        fresh.load_state_dict(whole)
        other = engine_of(config(**second), fresh)
        assert train(again, num_steps=2) == train(other, num_steps=2)
        assert_identical(dense_state(again), dense_state(other))


def test_plain_engines_of_what_only_ours_can_train(rank: Rank) -> None:
    """Cut models, what is inside of them or around them, their partial copies, and models without weights."""
    plain = {key: value for key, value in config().items() if key != "subnetwork_data_parallel"}
    words = ("an earlier engine reduced this model", "build a new one", "copy.deepcopy inside")
    for regime, strategy in MODES:
        model: Any = llama()
        engine = engine_of(config(holders=1, regime=regime, strategy=strategy), model)
        with engine.dense():
            whole = deepcopy(model)
        layer = model.model.layers[0]
        others = (model, nn.Sequential(layer), layer.mlp if strategy == "neuron" else model.model)
        for other in (*others, deepcopy(model)) if strategy == "neuron" or regime == "forward" else others:
            refusal(ValueError, partial(engine_of, plain, other), *words)
        refusal(ValueError, partial(engine_of, plain | config(enabled=False, holders=1), model), *words)
        train(engine_of(plain, whole), num_steps=1)
    uncut: Any = llama()
    engine_of(config(holders=2), uncut)
    train(engine_of(plain, uncut), num_steps=1)
    with sdp_deepspeed.Init():
        deferred = llama()
    refusal(NotImplementedError, partial(engine_of, plain, deferred), "meta tensor")


def test_ranks_that_train_nothing(rank: Rank) -> None:
    """Would let the others wait, since their loss has no gradient; also later."""
    model: Any = llama()
    model.requires_grad_(False)
    refusal(ValueError, partial(engine_of, config(holders=1), model), "'attention', 'mlp' are frozen", "unfreeze some")
    model.model.layers[1].mlp.requires_grad_(True)
    words = ("1 units with 1 holders each cannot give each of 2 subnetworks one",)
    for regime in ("forward", "backward"):
        refusal(ValueError, partial(engine_of, config(holders=1, regime=regime), model), *words)
    engine = engine_of(config(holders=2), model)
    train(engine, num_steps=1)
    refusal(ValueError, lambda: engine.replan({"holders": 1}), *words)
    train(engine, num_steps=1)


@pytest.mark.world(3)
def test_process_groups_of_earlier_engines(rank: Rank) -> None:
    """End with them: each takes memory of a GPU."""
    model, numbers = llama(), set[int]()
    for seed in range(3):
        train(engine_of(config(holders=2, seed=seed), model), num_steps=1)
        numbers.add(len(dist.distributed_c10d._world.pg_map))
    assert len(numbers) == 1, numbers
