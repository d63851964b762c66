"""Ranks that were not given the same end with one error that names what differs, before anything waits for anything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed import Init
from sdp_deepspeed.config import KEY
from sdp_deepspeed.engine import compare_configs
from tests.helpers.models import VOCABULARY, config, llama
from tests.helpers.ranks import COLLECTIVE_TIMEOUT, Rank
from tests.helpers.training import engine_of, gathered, refusal, train

pytestmark = pytest.mark.world(2)

OTHERS: tuple[tuple[Mapping[str, Any], Mapping[str, Any], str], ...] = (  # top level, block, what the message says
    ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps is 1 on rank 0 and 4 on rank 1"),
    ({"gradient_clipping": 2.0}, {}, "gradient_clipping is absent on rank 0 and 2.0 on rank 1"),
    ({"zero_optimization": {"stage": 2}}, {}, "zero_optimization.stage is 1 on rank 0 and 2 on rank 1"),
    ({"bf16": {"enabled": True}}, {}, "bf16.enabled is absent on rank 0 and true on rank 1"),
    ({"communication_data_type": "bf16"}, {}, 'communication_data_type is absent on rank 0 and "bf16" on rank 1'),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, 'scheduler.type is absent on rank 0 and "WarmupLR" on'),
    ({}, {"branch_scale": "none"}, f'{KEY}.branch_scale is "training" on rank 0 and "none" on rank 1'),
    ({}, {"check_agreement": True}, f"{KEY}.check_agreement is false on rank 0 and true on rank 1"),
    ({}, {"checkpoint": {"keep_last": 1}}, f"{KEY}.checkpoint.keep_last is null on rank 0 and 1 on rank 1"),
)


def test_values_that_one_rank_has(rank: Rank) -> None:
    for top, block, words in OTHERS:
        own = config(holders=1, **block) | dict(top) if rank.rank == 1 else config(holders=1)
        refusal(ValueError, lambda: engine_of(own), "different settings", words)  # noqa: B023 (runs at once)


def test_a_scheduler_that_one_rank_has(rank: Rank) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

    own: dict[str, Any] = {"lr_scheduler": scheduler} if rank.rank == 1 else {}
    words = 'lr_scheduler (argument) is "NoneType" on rank 0 and "function" on rank 1'
    refusal(ValueError, lambda: engine_of(config(holders=1), **own), words)


def test_an_accelerator_that_one_rank_has(rank: Rank) -> None:
    """A node whose driver torch cannot use trains on its CPU, and the first collective of the others waits for it."""
    there = mock.Mock(**{"device_name.return_value": ("cuda", "cpu")[rank.rank]})
    with mock.patch.object(compare_configs, "get_accelerator", return_value=there):
        refusal(ValueError, lambda: engine_of(config(holders=1)), 'accelerator is "cuda" on rank 0 and "cpu" on rank 1')


def test_groups_have_the_timeout_of_the_run(rank: Rank) -> None:
    """A rank that hangs must not be waited for longer in messages between all ranks, or by an asynchronous save."""
    engine = engine_of(config(holders=1, checkpoint={"asynchronous": True}))
    for group in (engine._control, engine.core.checkpoints._group):
        assert group._get_backend(torch.device("cpu")).options._timeout == COLLECTIVE_TIMEOUT


def test_mistakes_of_one_rank(rank: Rank) -> None:
    """In the block, in what it is combined with, in the model."""

    def start_with(wrong: dict[str, Any]) -> Any:
        return lambda: engine_of(wrong if rank.rank == 1 else config(holders=1))

    refusal(ValueError, start_with(config(holders=0)), "holders: got 0", "[on rank 1]")
    refusal(ValueError, start_with(config(holders=1) | {"sdp": {}}), "unknown top-level key 'sdp'", "[on rank 1]")
    refusal(
        ValueError, start_with(config(holders=1) | {"prescale_gradients": True}), "prescale_gradients", "[on rank 1]"
    )
    model: Any = llama()
    model.model.embed_tokens.sparse = rank.rank == 1
    refusal(ValueError, lambda: engine_of(config(holders=1), model), "produces sparse gradients", "[on rank 1]")
    for make in (nullcontext, Init):
        with make():
            tied: Any = llama()
            if rank.rank == 1:
                tied.lm_head.weight.data = tied.model.embed_tokens.weight.data
        refusal(ValueError, partial(engine_of, config(holders=1), tied), "share memory", "[on rank 1]")


def test_models_of_other_sizes(rank: Rank) -> None:
    """Before they are broadcast, which would end processes; with weights and without."""
    for make in (nullcontext, Init):
        with make():
            resized: Any = llama()
            resized.resize_token_embeddings(VOCABULARY + rank.rank, mean_resizing=False)
            deeper = llama(1 + rank.rank)
        words = ("model.embed_tokens.weight [62, 16] torch.float32 on rank 1", "[61, 16] torch.float32 on rank 0")
        refusal(RuntimeError, partial(engine_of, config(holders=1), resized), *words)
        refusal(RuntimeError, partial(engine_of, config(holders=1), deeper), "model.layers.1", "on rank 1")


def test_the_block_on_one_rank(rank: Rank) -> None:
    """The other builds DeepSpeed's engine, which waits in its first collective. Here it only says that it would."""
    if rank.rank == 1:
        assert compare_configs.parse_and_compare({"train_micro_batch_size_per_gpu": 2}, {}) is None
    else:
        with pytest.raises(RuntimeError, match="rank 1 has a config without 'subnetwork_data_parallel'"):
            engine_of(config(holders=1))
    gathered(None)
    train(engine_of(config(holders=1)), num_steps=1)


def test_values_as_deepspeed_reads_them(rank: Rank) -> None:
    """It takes text for numbers, and so do we, for what is refused and for what runs."""
    refusal(ValueError, lambda: engine_of(config(holders=1) | {"zero_optimization": {"stage": "3"}}), "stage: got 3")
    for stage, overlap in (("0", "false"), ("1", "false"), ("2", "true")):
        engine = engine_of(config(holders=1) | {"zero_optimization": {"stage": stage, "overlap_comm": overlap}})
        assert engine.zero_optimization_stage() == int(stage)
        assert engine.optimizer.sharded.stage == max(1, int(stage)), "stage 0 runs as stage 1"
        assert engine.optimizer.sharded.reducer.overlap == (overlap == "true")
    wrong = {"zero_optimization": {"stage": 1, "compute_grad_norm": "false"}, "gradient_clipping": 1.0}
    refusal(ValueError, lambda: engine_of(config(holders=1) | wrong), "compute_grad_norm: got False")
    engine_of(config(holders=1) | {"zero_optimization": {"stage": 1, "zero_quantized_weights": "false"}})
    for value in (float("nan"), "1.0", "auto"):
        clipped = config(holders=1) | {"gradient_clipping": value}
        refusal(ValueError, lambda: engine_of(clipped), "gradient_clipping: got")  # noqa: B023 (runs at once)


def test_what_ranks_may_choose(rank: Rank) -> None:
    """What they print; and a plain engine waits for nobody, also beside ours."""
    plain = {key: value for key, value in config().items() if key != KEY}
    train(engine_of(plain), num_steps=1)
    own = {"steps_per_print": rank.rank + 1, "wall_clock_breakdown": rank.rank == 0}
    train(engine_of(config(holders=1) | own), num_steps=1)
    train(engine_of(plain | {KEY: {"enabled": False}}), num_steps=1)
    train(engine_of(config(holders=1)), num_steps=1)
