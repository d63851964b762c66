"""The engine's surface as DeepSpeed's users know it: accumulation, schedules, monitor, overflow, collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.traffic_counter import TrafficCounter
from tests.helpers.models import config, llama, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    micro_step,
    own_batches,
    refusal,
    sgd,
    train,
)


def accumulated(rank: Rank, num: int) -> dict[str, torch.Tensor]:
    """The model after one ordinary step over `num` micro-batches."""
    engine = engine_of(sgd(num))
    for batch in own_batches(rank, num):
        micro_step(engine, batch)
    assert engine.global_steps == 1
    return dense_state(engine)


def in_buckets(settings: dict[str, Any]) -> dict[str, Any]:
    """About ten of the small Llama."""
    return settings | {"zero_optimization": settings["zero_optimization"] | {"reduce_bucket_size": 900}}


def no_sync(rank: Rank) -> None:
    expected, engine = accumulated(rank, 3), engine_of(sgd(3))
    *first, last = own_batches(rank, 3)
    engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync():
        for batch in first:
            engine.backward(loss_of(engine, batch))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, last))
    engine.step()
    assert_identical(dense_state(engine), expected)


def set_gradient_accumulation_boundary(rank: Rank) -> None:
    """The caller's boundary: step() on the way does nothing, and one step at the end takes all."""
    expected, engine = accumulated(rank, 2), engine_of(sgd(2))
    for is_last, batch in zip((False, True), own_batches(rank, 2), strict=True):
        engine.set_gradient_accumulation_boundary(is_last)
        micro_step(engine, batch)
        assert engine.global_steps == int(is_last)
    assert_identical(dense_state(engine), expected)


def several_backward_passes_before_a_step(rank: Rank) -> None:
    """Their gradients add up: two halves of a loss are the loss, to a rounding of each sum."""
    for stage in (1, 2):
        engines = [engine_of(in_buckets(sgd(stage=stage))) for _ in range(2)]
        (batch,) = own_batches(rank, 1)
        engines[0].backward(loss_of(engines[0], batch))
        for _ in range(2):
            engines[1].backward(loss_of(engines[1], batch) / 2)
        for engine in engines:
            engine.step()
        one, two = (dense_state(engine) for engine in engines)
        for name, value in one.items():
            assert torch.allclose(value, two[name], rtol=0, atol=1e-7), (stage, name)


def torch_style_backward(rank: Rank) -> None:
    """`loss.backward()` does what it does in plain ZeRO, which on Transformers outputs divides more than once."""
    start = llama().state_dict()
    for stage in (1, 2):
        settings = in_buckets(sgd(2, stage=stage, holders=2))
        plain = without_block(settings)
        engines = [engine_of(settings), engine_of(plain | {"zero_allow_untested_optimizer": True})]
        for engine in engines:
            for batch in own_batches(rank, 2):
                loss_of(engine, batch).backward()
                engine.step()
            assert engine.global_steps == 1
        ours, expected = (dense_state(engine) for engine in engines)
        for name, value in expected.items():
            moved = (value - start[name]).norm()
            assert (ours[name] - value).norm() <= 1e-5 * moved + 2**-24 * value.norm(), (stage, name)


def schedules(rank: Rank) -> None:
    """JSON, object and callable; the rate reaches the weights: after a step at rate zero nothing has moved."""
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}

    def ramp(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)

    model = llama()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    bare = {key: value for key, value in sgd().items() if key != "optimizer"}
    bare["zero_allow_untested_optimizer"] = True
    engines = [
        engine_of(sgd() | {"scheduler": {"type": "WarmupLR", "params": warmup}}),
        engine_of(sgd(), lr_scheduler=ramp),
        engine_of(bare, model, optimizer=given, lr_scheduler=ramp(given)),
    ]
    start = llama().state_dict()
    for engine in engines[1:]:
        train(engine, num_steps=1)
        assert_identical(dense_state(engine), start)
        train(engine, num_steps=2)
        assert engine.get_lr() == pytest.approx([0.03])
    train(engines[0], num_steps=3)
    assert 0 < engines[0].get_lr()[0] < 0.1
    rates = [engines[0].get_lr()[0]]
    train(engines[0], num_steps=1)
    assert engines[0].get_lr()[0] > rates[0]


def monitor_and_printing(rank: Rank) -> None:
    """csv_monitor, steps_per_print and wall_clock_breakdown together."""
    settings = sgd() | {"steps_per_print": 1, "wall_clock_breakdown": True}
    settings["csv_monitor"] = {"enabled": True, "output_path": str(rank.folder), "job_name": "run"}
    engine = engine_of(settings)
    train(engine, num_steps=2)
    dist.barrier()
    written = {path.name: path.read_text().splitlines() for path in (rank.folder / "run").glob("*.csv")}
    rates = [lines for name, lines in written.items() if "lr" in name]
    assert rates, written
    assert len(rates[0]) == 3, rates  # a header and two steps
    engine.destroy()


def spoil(engine: Any, batch: torch.Tensor, value: float, on: bool) -> None:
    engine.backward(loss_of(engine, batch) * (value if on else 1.0))
    engine.step()


def not_finite_is_seen_by_all(rank: Rank) -> None:
    """Every rank sees the same norm, also who had finite gradients. In fp32 ZeRO leaves the step out, and reports inf,
    as DeepSpeed does; stage 0 does not look, as DeepSpeed does not either."""
    for value, stage in itertools.product((float("nan"), float("inf")), (0, 1, 2)):
        engine = engine_of(sgd(stage=stage, clip=1.0))
        spoil(engine, own_batches(rank, 1)[0], value, rank.rank == 1)
        norms = gathered(engine.get_global_grad_norm())
        assert not any(norm - norm == 0 for norm in norms), norms
        assert gathered(engine.skipped_steps) == [int(stage > 0)] * rank.size


def overflow_skips_the_step_on_all(rank: Rank) -> None:
    for stage in (0, 1, 2):
        settings = sgd(stage=stage) | {"bf16": {"enabled": True, "check_grad_overflow": True}}
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        engine = engine_of(settings)
        train(engine, num_steps=2)
        before, rate = dense_state(engine), engine.get_lr()
        spoil(engine, own_batches(rank, 1)[0], float("inf"), rank.rank == 1)
        assert gathered(engine.skipped_steps) == [1] * rank.size
        assert engine.was_step_applied() is False
        assert engine.get_lr() == rate
        assert_identical(dense_state(engine), before)
        train(engine, num_steps=1)  # the spoiled gradients are gone
        assert gathered(engine.skipped_steps) == [1] * rank.size
        assert all(bool(value.isfinite().all()) for value in dense_state(engine).values())


def small_buckets_change_nothing(rank: Rank) -> None:
    """The same bits. Two ranks, so that sums have one order; no clipping, because the norm's sum has another."""
    states, counts = [], []
    for size in (int(5e8), 500):
        settings = config(holders=1) | {"gradient_clipping": 0.0}
        settings["optimizer"]["params"]["fused"] = False  # a CPU's fused kernel rounds a tensor's end otherwise
        settings["zero_optimization"] = {"stage": 1, "reduce_bucket_size": size}
        engine = engine_of(settings)
        counts.append(len(engine.optimizer.sharded.held))
        train(engine, num_steps=3)
        states.append(dense_state(engine))
    assert counts[0] == 2  # what one rank holds, and what both do
    assert counts[1] > 5
    assert_identical(*states)


def collectives_of_a_step(rank: Rank) -> None:
    """Each averaged element is sent once on its way and once on its way back, of two ranks' halves, and one number for
    the norm; nothing in a micro-step. Stage 2 has a test of its own."""
    for stage, layers, size in itertools.product((0, 1), (2, 6), (int(5e8), 2000)):
        settings = sgd(2, stage=stage, holders=2)  # so that each bucket has something to send
        settings["zero_optimization"] |= {"reduce_bucket_size": size}
        engine = engine_of(settings, llama(layers))
        for index, batch in enumerate(own_batches(rank, 2)):
            with TrafficCounter() as traffic:
                micro_step(engine, batch)
            assert index or not traffic.total
        buckets = len(engine.optimizer.sharded.held)
        assert (buckets == 1) == (size > 2000)
        num_bytes = 4 * sum(parameter.numel() for parameter in engine.module.parameters())
        assert 0 <= traffic.total - num_bytes <= 8 * buckets + 8  # padding of both ways, and the norm
        collectives = {"allreduce_": buckets + 1} if stage == 0 else {"allreduce_": 1, "send": 2 * buckets}
        assert {name: traffic.calls_by_operator[name] for name in collectives} == collectives


def few_units(rank: Rank) -> None:
    """One layer on two ranks: each has one branch, or, as a unit of its own, one of two layers."""
    for granularity, layers in (("sublayer", 1), ("layer", 2)):
        engine = engine_of(sgd(granularity=granularity, check_agreement=True), llama(layers))
        assert len(engine.plan.units) == 2
        losses = train(engine, num_steps=3)
        assert all(loss - loss == 0 for loss in losses)


def frozen_in_mid_run(rank: Rank) -> None:
    """As in plain DeepSpeed momentum and decay go on moving it, but at stage 0 in fp32, where that leaves it alone:
    there it is an error."""
    name = "model.layers.0.mlp.up_proj.weight"
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}}}
    for stage, half in ((0, False), (0, True), (1, False), (2, True)):
        settings = config(holders=2) | adamw | {"zero_optimization": {"stage": stage}, "bf16": {"enabled": half}}
        moved, states = [], []
        for engine in map(engine_of, (settings, without_block(settings))):
            parameter = engine.module.get_parameter(name)
            train(engine, num_steps=2)
            before = parameter.detach().clone()
            parameter.requires_grad_(False)
            if (stage, half) == (0, False) and hasattr(engine, "plan"):
                refusal(RuntimeError, partial(train, engine, num_steps=1), f"'{name}'", "before deepspeed.initialize")
                break
            train(engine, num_steps=2, first=2)
            moved.append(not torch.equal(parameter, before))
            parameter.requires_grad_(True)
            train(engine, num_steps=1, first=4)
            states.append(dense_state(engine))
        assert all(moved)
        if len(states) == 2 and not half:
            for name_, value in states[1].items():
                torch.testing.assert_close(states[0][name_], value, rtol=1e-3, atol=1e-5)


def unfrozen_in_mid_run(rank: Rank) -> None:
    """Refused by name: there is no room for it in the exchange. What the optimizer never got is nobody's concern."""
    name = "model.norm.weight"
    for stage, given in itertools.product((0, 1), (True, False)):
        model = llama()
        model.get_parameter(name).requires_grad_(False)
        parameters = [parameter for parameter in model.parameters() if given or parameter.requires_grad]
        engine = engine_of(
            config(holders=2) | {"zero_optimization": {"stage": stage}}, model, model_parameters=parameters
        )
        train(engine, num_steps=1)
        engine.module.get_parameter(name).requires_grad_(True)
        if given:
            refusal(RuntimeError, partial(train, engine, num_steps=1), f"'{name}'", "would not be trained", "freeze it")
        else:
            train(engine, num_steps=1)


def destroyed_engines_leave_room(rank: Rank) -> None:
    """A second engine on the same ranks after `destroy` trains as the first did."""
    states = []
    for _ in range(2):
        engine = engine_of(sgd())
        train(engine, num_steps=2)
        states.append(dense_state(engine))
        engine.destroy()
    assert_identical(*states)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        no_sync,
        set_gradient_accumulation_boundary,
        several_backward_passes_before_a_step,
        torch_style_backward,
        schedules,
        monitor_and_printing,
        not_finite_is_seen_by_all,
        overflow_skips_the_step_on_all,
        small_buckets_change_nothing,
        collectives_of_a_step,
        few_units,
        frozen_in_mid_run,
        unfrozen_in_mid_run,
        destroyed_engines_leave_room,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
