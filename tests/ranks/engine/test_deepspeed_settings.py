"""What else is set in DeepSpeed's config, or in torch: batch sizes, data, dtypes, defaults, timers, monitors."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm

from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.config import MODES
from tests.helpers.checkpointed_runs import stepped
from tests.helpers.models import SPECIMENS, batches, config, llama, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    micro_step,
    own_batches,
    sgd,
    train,
)
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)


def test_gradients_travel_in_their_dtype(rank: Rank) -> None:
    """And weights that return in theirs: what is sent of gradients is half where it has half the bytes."""
    for stage in (1, 2):
        sent: dict[str | None, int] = {}
        for name in (None, "bf16"):
            settings = config(holders=2) | {"zero_optimization": {"stage": stage}}
            engine = engine_of(settings | ({} if name is None else {"communication_data_type": name}))
            with TrafficCounter() as traffic:
                train(engine, num_steps=1)
            sent[name] = traffic.total
        num_elements = sum(parameter.numel() for parameter in engine.module.parameters())
        assert sent[None] - sent["bf16"] == pytest.approx(num_elements, abs=64), stage  # a half of each is sent


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """A user's: a GPU, for which "meta" stands here since a tensor there has no values either, and a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def test_defaults_of_torch_do_no_harm(rank: Rank) -> None:
    """A tensor of ours that took the default device would have no values, one that took the dtype wrong ones."""
    for stage in (0, 1, 2):
        settings = config(holders=1) | {"zero_optimization": {"stage": stage}}
        folder = str(rank.folder / f"defaults_{stage}")
        model = llama()
        engine = engine_of(settings, llama())
        with defaults(torch.bfloat16):
            other = engine_of(settings, model)
        train(engine, num_steps=1)
        for state in engine.optimizer.optimizer.state.values():
            state["step"].fill_(257.0)  # which bf16 has not
        (batch,) = own_batches(rank, 1)
        with defaults(torch.bfloat16):
            engine.save_checkpoint(folder, client_state={"seen": 3})
            assert other.load_checkpoint(folder)[1] == {"seen": 3}
            dense = dense_state(other)
        assert_identical(dense, dense_state(engine))
        assert_identical(stepped(other), stepped(engine))
        micro_step(engine, batch)
        with defaults(torch.bfloat16):
            micro_step(other, batch)
        assert_identical(dense_state(other), dense_state(engine))


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The same without our block."""
    settings = without_block(settings)
    return settings | {"zero_allow_untested_optimizer": True}


def test_comms_logger(rank: Rank) -> None:
    """`deepspeed.comm.log_summary()` has the collectives of each step's buckets."""
    logger = deepspeed_comm.comms_logger
    try:
        logger.comms_dict = {}
        settings = sgd(holders=2, stage=1) | {"comms_logger": {"enabled": True}}
        engine = engine_of(settings, SPECIMENS["llama"].build())
        train(engine, num_steps=3)
        sizes = logger.comms_dict["isend"]
        assert sum(count for count, *_ in sizes.values()) == 2 * 3 * len(engine.optimizer.sharded.held)
        assert "isend" in str(deepspeed.comm.log_summary(return_dict=True))
    finally:
        logger.enabled, logger.comms_dict = False, {}


def test_timers_and_prints(rank: Rank) -> None:
    """They change no bits; the timers that a caller can ask for are those of plain ZeRO-1."""
    tools = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "steps_per_print": 1}
    states, timers = [], []
    for settings in (sgd(stage=2), sgd(stage=2) | tools, plain(sgd(stage=2)) | tools):
        engine = engine_of(settings)
        train(engine, num_steps=1)
        states.append(dense_state(engine))
        timers.append(engine.get_wall_clock_timers())
    assert_identical(*states[:2])
    assert timers[1].keys() == timers[2].keys() >= {"fwd", "bwd", "step"}
    assert all(value > 0 for value in (timers[1]["fwd"], timers[1]["bwd"], timers[1]["step"]))


def test_states_on_the_host_between_steps(rank: Rank) -> None:
    """As for a generation between two steps: in evaluation nobody needs them, and a step says who does."""
    states = []
    for moves in (False, True):
        engine = engine_of(config(holders=1) | {"bf16": {"enabled": True}})
        train(engine, num_steps=1)
        if moves:
            engine.offload_states()
            with engine.dense():
                pass
            with pytest.raises(RuntimeError, match=r"call reload_states\(\)"):
                train(engine, num_steps=1)
            engine.zero_grad()
            engine.reload_states()
        train(engine, num_steps=1)
        states.append(dense_state(engine))
    assert_identical(*states)


BATCH = 2 * 2 * 2  # samples of a step: ranks, micro-steps, samples of a micro-batch


def test_what_monitors_get(rank: Rank) -> None:
    """Rank 1 has no monitor: rank 0 decides for both. After two steps the plan is that of the whole model, whose loss
    has another name."""
    where = {"enabled": True, "output_path": str(rank.folder), "job_name": "ours"}
    engine = engine_of(sgd(2) | ({"csv_monitor": where, "steps_per_print": 2} if rank.rank == 0 else {}))
    losses, norms, coverage = [], [], {}
    for first in range(4):
        if first == 2:
            engine.replan({"coverage": 1.0})
        coverage[BATCH * (first + 1)] = engine.coverage
        losses.append(train(engine, num_steps=1, accumulation=2, first=first))
        norms.append(engine.get_global_grad_norm())
    every = gathered(losses)
    files = (rank.folder / "ours").glob("*.csv")
    tables = {path.stem: list(csv.reader(path.read_text().splitlines()))[1:] for path in files}
    events = {name: {int(samples): float(value) for samples, value in table} for name, table in tables.items()}
    assert events.pop("Train_Samples_lr").keys() == {BATCH * step for step in range(1, 5)}
    assert [*events["Train_Samples_gradient_norm"]] == [BATCH * 2, BATCH * 4]
    for samples, index, name in ((BATCH * 2, 1, "subnetwork_loss"), (BATCH * 4, 3, "train_loss")):
        mean = sum(loss for own in every for loss in own[index]) / 4
        assert events[f"Train_Samples_{name}"] == pytest.approx({samples: mean}, rel=1e-6)
        assert events["Train_Samples_gradient_norm"][samples] == pytest.approx(norms[index])
        assert events["Train_Samples_coverage"][samples] == pytest.approx(coverage[samples])
    assert [*coverage.values()] == pytest.approx([0.5, 0.5, 1.0, 1.0])


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


def test_sizes_are_derived_as_with_zero_1(rank: Rank) -> None:
    """All data-parallel ranks count, also those that train one subnetwork together."""
    given = {key: value for key, value in sgd().items() if key not in BATCH_KEYS} | {"train_batch_size": 12}
    replicated = given | {"subnetwork_data_parallel": {"holders": 1, "subnetworks": 1}}
    for settings in (given, replicated, plain(given)):
        engine = engine_of(settings | {"gradient_accumulation_steps": 3})
        assert [getattr(engine, key)() for key in BATCH_KEYS] == [12, 2, 3]
        engine.set_train_micro_batch_size(5)
        engine.set_train_batch_size(30 * rank.size)
        assert [getattr(engine, key)() for key in BATCH_KEYS] == [30 * rank.size, 5, 6]


def test_dtypes_spelled_out(rank: Rank) -> None:
    """`data_types` that say what is so anyway are accepted; gradients are summed, and buffers are, in what is asked."""
    train(engine_of(sgd() | {"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "fp32"}}), num_steps=1)
    for data_types, dtype in (({}, torch.bfloat16), ({"grad_accum_dtype": "fp32"}, torch.float32)):
        bf16 = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"} | data_types}
        engine = engine_of(sgd(2) | bf16)
        train(engine, num_steps=1)  # the first of two micro-steps
        gradients = [bucket.gradients for bucket in engine.optimizer.sharded.held]
        assert {gradient.flat.dtype for gradient in gradients if gradient.has_memory} == {dtype}
        assert {buffer.dtype for buffer in engine.module.buffers()} == {torch.bfloat16}
