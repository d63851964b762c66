"""Activation checkpointing, accumulation, batch sizes and data loaders, as with plain ZeRO-1.

What the oracle suite compares with `reference/` is trained once more with something added; the bits must not change.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import deepspeed
import pytest
import torch
from torch.utils.data import Dataset

from sdp_deepspeed.config import MODES
from tests.helpers.models import SPECIMENS, VOCABULARY, batches, config, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import SGD, engine_of, micro_step, sgd, train
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)


def block_of(number: int) -> dict[str, Any]:
    """Block units are whole layers here: one that lacks has nothing to recompute."""
    regime, strategy = MODES[number]
    block = {"regime": regime, "strategy": strategy, "check_agreement": True}
    return block | ({"granularity": "layer"} if strategy == "block" else {})


def test_another_batch_size_while_training(rank: Rank) -> None:
    """`set_train_batch_size`, against the oracle. DeepSpeed counts micro-batches from the start, so that a step
    is whole only where the new number divides the count."""
    for number, stage in ((0, 1), (3, 2)):
        model = SPECIMENS["llama"].build()
        dense = deepcopy(model)
        engine = engine_of(sgd(stage=stage, clip=0.5, **block_of(number)), model)
        reference = Reference(dense, engine.plan, lambda named: torch.optim.SGD(named.values(), lr=0.1), loss_of, 0.5)
        for accumulation in (3, 1, 2):
            engine.set_train_batch_size(2 * rank.size * accumulation)
            step = next(batches(rank.size, accumulation, seed=accumulation))
            losses, norm = reference.step(step)
            found = [micro_step(engine, batch) for batch in step[rank.rank]]
            assert found == pytest.approx(losses[rank.rank], abs=1e-5)
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        assert engine.global_steps == 3
        assert engine.global_samples == 2 * rank.size * (3 + 1 + 2)


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes_of(engine: Any) -> list[Any]:
    """What was derived, and what the setters make of it."""
    found = [[getattr(engine, key)() for key in BATCH_KEYS]]
    engine.set_train_micro_batch_size(5)
    found.append([getattr(engine, key)() for key in BATCH_KEYS])
    engine.set_train_batch_size(30 * engine.dp_world_size)
    found.append([getattr(engine, key)() for key in BATCH_KEYS])
    with pytest.raises(ValueError, match="divisible"):
        engine.set_train_batch_size(7)
    return found


def test_sizes_are_derived_as_with_zero_1(rank: Rank) -> None:
    """All data-parallel ranks count, also those that train one subnetwork together."""
    for sizes in ((12, None, 3), (None, 3, None)):
        settings = {key: value for key, value in sgd().items() if key not in BATCH_KEYS}
        settings |= {key: value for key, value in zip(BATCH_KEYS, sizes, strict=True) if value is not None}
        plain = without_block(settings) | {"zero_allow_untested_optimizer": True}
        replicated = settings | {"subnetwork_data_parallel": {"holders": 1, "subnetworks": 1}}
        assert sizes_of(engine_of(settings)) == sizes_of(engine_of(replicated)) == sizes_of(engine_of(plain)), sizes


def step_on(engine: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return batch["input_ids"]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def test_training_data(rank: Rank) -> None:
    """`deepspeed.initialize(training_data=...)` gives each rank the batches that it gets with ZeRO-1."""
    seen = []
    for block in ({"subnetwork_data_parallel": {"holders": 1}}, {}):
        settings = config() | {"optimizer": SGD, "dataloader_drop_last": True, "zero_allow_untested_optimizer": True}
        del settings["subnetwork_data_parallel"]
        model = SPECIMENS["llama"].build()
        engine, _, loader, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings | block, training_data=Sentences()
        )
        assert len(loader) == 4
        loader.num_local_io_workers = 0  # else each rank starts processes
        seen.append([step_on(engine, batch) for batch in loader])
        assert engine.global_steps == 4
    for own, expected in zip(*seen, strict=True):
        assert torch.equal(own, expected)


def test_dtypes_spelled_out(rank: Rank) -> None:
    """`data_types` that say what is so anyway are accepted; gradients are summed, and buffers are, in what is asked."""
    train(engine_of(sgd() | {"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "fp32"}}), num_steps=1)
    for data_types, dtype in (({}, torch.bfloat16), ({"grad_accum_dtype": "fp32"}, torch.float32)):
        bf16 = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"} | data_types}
        engine = engine_of(sgd(2) | bf16)
        train(engine, num_steps=1)  # the first of two micro-steps
        gradients = [bucket.gradients for bucket in engine.optimizer.sharded.held]
        assert {gradient.dtype for gradient in gradients if gradient is not None} == {dtype}
        assert {buffer.dtype for buffer in engine.module.buffers()} == {torch.bfloat16}
