"""Every key of DeepSpeed's config that the optimizer reads reaches it; each one's effect is tested where it acts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.common.traffic_counter import TrafficCounter
from tests.helpers.checkpointed_runs import stepped
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, own_batches, train

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CPU = {"device": "cpu", "pin_memory": True}


def optimizer_of(engine_config: dict[str, Any], **zero: Any) -> Any:
    settings = config(holders=1) | {"zero_force_ds_cpu_optimizer": False} | engine_config
    settings["zero_optimization"] = {"stage": 2} | zero
    return engine_of(settings).optimizer


def what_the_config_says(rank: Rank) -> None:
    plain = optimizer_of({})
    assert (plain.sharded.stage, plain.sharded.overlap, plain.reports_norm, plain.skips_overflow) == (
        2,
        False,
        True,
        True,
    )
    assert all(bucket.host is None for bucket in plain.sharded.held)
    assert optimizer_of({}, stage=0).sharded.stage == 0
    assert optimizer_of({}, overlap_comm=True).sharded.overlap is True
    assert len(optimizer_of({}, reduce_bucket_size=1234).sharded.buckets) > len(plain.sharded.buckets)
    assert all(bucket.host is not None for bucket in optimizer_of({}, offload_optimizer=CPU).sharded.held)
    assert optimizer_of({"gradient_clipping": 0.0}, compute_grad_norm=False).reports_norm is False
    assert optimizer_of({"gradient_clipping": 0.25}).sharded.clip == 0.25
    for checks in (False, True):
        bf16 = {"enabled": True, "check_grad_overflow": checks}
        assert optimizer_of({"bf16": bf16}).skips_overflow is checks
    for data_types, dtype in (({}, torch.bfloat16), ({"grad_accum_dtype": "fp32"}, torch.float32)):
        settings = config(holders=1) | BF16 | {"data_types": data_types, "gradient_accumulation_steps": 2}
        engine = engine_of(settings | {"zero_optimization": {"stage": 1}})
        train(engine, num_steps=1)  # the first of two micro-steps
        assert {gradient.dtype for gradient in engine.optimizer.sharded.gradient_tensors()} == {dtype}


def gradients_travel_in_their_dtype(rank: Rank) -> None:
    """And weights that return in theirs: what is sent of gradients is half where it has half the bytes."""
    for stage in (0, 1, 2):
        sent: dict[str | None, int] = {}
        for name in (None, "bf16", "fp16"):
            settings = config(holders=2) | {"zero_optimization": {"stage": stage}}
            engine = engine_of(settings | ({} if name is None else {"communication_data_type": name}))
            with TrafficCounter() as traffic:
                train(engine, num_steps=1)
            sent[name] = traffic.total
        num_elements = sum(parameter.numel() for parameter in engine.module.parameters())
        halves = 2 * num_elements if stage == 0 else num_elements  # all-reduced, or one half of them sent
        assert sent["bf16"] == sent["fp16"]
        assert sent[None] - sent["bf16"] == pytest.approx(halves, abs=64), stage


def checkpoints_of_other_buckets_go_on(rank: Rank) -> None:
    """Buckets decide who owns what, in which order: states of the same size would land on other elements."""
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        shared = {"stage": 1, "reduce_bucket_size": 10**6} | zero
        engines = []
        for sizes in ({}, {"reduce_bucket_size": 3000}):
            settings = config(holders=1) | {"zero_force_ds_cpu_optimizer": False} | BF16
            engines.append(engine_of(settings | {"zero_optimization": shared | sizes}))
        first, *others = engines
        train(first, num_steps=1)
        folder = str(rank.folder / f"buckets_{len(zero)}")
        first.save_checkpoint(folder)
        train(first, num_steps=1, first=1)
        for other in others:
            other.load_checkpoint(folder)
            train(other, num_steps=1, first=1)
            assert_identical(dense_state(other), dense_state(first))


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


def defaults_of_torch_do_no_harm(rank: Rank) -> None:
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


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        what_the_config_says,
        gradients_travel_in_their_dtype,
        checkpoints_of_other_buckets_go_on,
        defaults_of_torch_do_no_harm,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
