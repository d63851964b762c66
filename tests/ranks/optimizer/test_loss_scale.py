"""Loss scaling in fp16, and steps that are left out: as in DeepSpeed's ZeRO-1, decided by all ranks together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

import pytest
import torch

from tests.helpers.fp16_runs import DYNAMIC, WARMUP, engine_of, settings_of
from tests.helpers.models import batches, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, gathered, refusal, sgd, train

pytestmark = pytest.mark.world(2)

TOO_LARGE = 1e30  # times the loss: an infinite gradient in fp16
SPOILED = (1, 3, 4, 5, 16)  # steps
NUM_STEPS = 18

Row = tuple[float, int, int, float, bool]


def plain(settings: dict[str, Any], stage: int) -> Any:
    """Stock DeepSpeed's engine."""
    return engine_of(without_block(settings) | {"zero_optimization": {"stage": stage}})


def trace(
    rank: Rank, engine: Any, *, spoiled: Collection[int] = SPOILED, first: int = 0, last: int = NUM_STEPS
) -> tuple[list[Row], list[float]]:
    """Per step the scale after it, counts of skipped and of all steps, learning rate, and whether it was taken; and
    the norms. Rank 1 alone has an infinite gradient in the `spoiled` steps: everywhere, or in the odd ones of a single
    element, of which one rank alone owns the average."""
    rows, norms, element = [], [], [1.0]
    handle = engine.module.lm_head.weight.register_hook(lambda gradient: _with_one(gradient, element[0]))
    for number, step in enumerate(itertools.islice(batches(rank.size, 1), first, last), first):
        loss = loss_of(engine, step[rank.rank][0])
        factor = TOO_LARGE if rank.rank == 1 and number in spoiled else 1.0
        element[0] = factor if number % 2 else 1.0
        engine.backward(loss if number % 2 else loss * factor)
        engine.step()
        rate = engine.get_lr()[0]
        scale, applied = float(engine.optimizer.cur_scale), bool(engine.was_step_applied())
        rows.append((scale, engine.skipped_steps, engine.global_steps, rate, applied))
        norms.append(float(engine.get_global_grad_norm()))
    handle.remove()
    assert [norm == math.inf for norm in norms] == [number in spoiled for number in range(first, last)]
    assert gathered(rows) == [rows] * rank.size
    return rows, norms


def _with_one(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """With its first element made infinite, unless `factor` is 1."""
    result = gradient.clone()
    result[0, 0] = result[0, 0] if factor == 1.0 else math.inf
    return result


def compare_norms(ours: list[float], expected: list[float]) -> None:
    """At C = 1; gradients in fp16 have 11 significant bits, and sums of two are rounded again."""
    for norm, wanted in zip(ours, expected, strict=True):
        assert norm == wanted or abs(norm - wanted) <= 2 * 2**-11 * wanted


def test_dynamic_as_zero_1(rank: Rank) -> None:
    """Hysteresis, window and smallest scale act, and are filled up again or not, as in stock ZeRO-1, at every stage."""
    paths = []
    cases: list[tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = [
        ({"consecutive_hysteresis": True}, [(1, {"holders": 2})]),
        ({}, [(2, {"holders": 2}), (0, {"regime": "backward", "strategy": "neuron"})]),
    ]
    for more, ours in cases:
        expected, norms = trace(rank, plain(settings_of(1, DYNAMIC | more), 1))
        paths.append([row[0] for row in expected])
        for stage, block in ours:
            rows, own = trace(rank, engine_of(settings_of(stage, DYNAMIC | more, **block)))
            assert rows == expected, stage
            if "holders" in block:
                compare_norms(own, norms)
    assert [min(path) for path in paths] == [16, 8]
    assert [max(path) for path in paths] == [256, 128]


def test_static_as_zero_1(rank: Rank) -> None:
    """It does not change, and steps are left out all the same."""
    expected, norms = trace(rank, plain(settings_of(1, {"loss_scale": 64}), 1), last=6)
    assert {row[0] for row in expected} == {64.0}
    assert expected[-1][1] == 4
    for stage in (0, 2):
        rows, own = trace(rank, engine_of(settings_of(stage, {"loss_scale": 64}, holders=2)), last=6)
        assert rows == expected
        compare_norms(own, norms)


def test_the_scale_cancels(rank: Rank) -> None:
    """A power of two changes exponents only, as long as nothing under- or overflows: the same bits, for a static scale
    as for one that the caller gives."""
    states = []
    for scale, given in ((64, None), (256, None), (64, 128)):
        engine = engine_of(settings_of(1, {"loss_scale": scale}))
        if given is not None:
            engine.optimizer.override_loss_scale(given)
            assert engine.optimizer.loss_scale == given
        trace(rank, engine, spoiled=(), last=3)
        states.append(dense_state(engine))
    assert_identical(states[0], states[1])
    assert_identical(states[0], states[2])


@pytest.mark.slow
def test_losses_must_be_scaled(rank: Rank) -> None:
    """`loss.backward()` is refused as in stock, under a static scale too, where stock would divide what was never
    multiplied; `engine.scale(loss).backward()` is `engine.backward(loss)`."""
    batch = next(batches(rank.size, 1))[rank.rank][0]
    for stage, fp16 in ((1, DYNAMIC), (2, {"loss_scale": 64})):
        engine = engine_of(settings_of(stage, fp16))
        refusal(RuntimeError, loss_of(engine, batch).backward, "Loss scaling is required", "engine.scale(loss)")
        states = []
        for direct in (False, True):
            engine = engine_of(settings_of(stage, fp16))
            for _ in range(2):
                loss = loss_of(engine, batch)
                if direct:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            states.append(dense_state(engine))
        assert_identical(*states)


def test_the_scaler_resumes(rank: Rank) -> None:
    """Scale, hysteresis and the count of good steps are in the checkpoint, so that the path goes on as if unbroken."""
    engine = engine_of(settings_of(2, DYNAMIC))
    trace(rank, engine, last=5)
    engine.save_checkpoint(str(rank.folder))
    expected, _ = trace(rank, engine, first=5)
    resumed = engine_of(settings_of(2, DYNAMIC))
    assert resumed.load_checkpoint(str(rank.folder))[0] is not None
    rows, _ = trace(rank, resumed, first=5)
    assert rows == expected
    assert_identical(dense_state(resumed), dense_state(engine))


def test_not_finite_without_a_scale(rank: Rank) -> None:
    """Under ZeRO a norm that is not finite leaves the step out on all ranks, as in stock, and in bf16 where that is
    asked for; in fp32 without ZeRO, or if no norm is computed, nobody looks."""
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    cases: list[tuple[dict[str, Any], int, bool]] = [(more, stage, True) for more in ({}, bf16) for stage in (0, 1, 2)]
    cases += [({}, 1, False), ({}, 2, False)]  # which DeepSpeed refuses at stage 0
    for more, stage, norm in cases:
        settings = sgd(stage=stage) | more | {"scheduler": WARMUP}
        settings["zero_optimization"] |= {"compute_grad_norm": norm}
        engines = [engine_of(settings)]
        if stage == 1 and not more:
            engines.append(engine_of(without_block(settings) | {"zero_allow_untested_optimizer": True}))
        for engine in engines:
            train(engine, num_steps=2)
            before, rate = dense_state(engine), engine.get_lr()
            loss = loss_of(engine, next(batches(rank.size, 1))[rank.rank][0])
            engine.backward(loss * (math.inf if more else math.nan) if rank.rank == 1 else loss)
            engine.step()
            skips = norm and (stage > 0 or more == bf16)
            assert gathered(engine.skipped_steps) == [int(skips)] * rank.size
            assert (engine.get_global_grad_norm() == math.inf) == skips
            assert (engine.get_global_grad_norm() is None) == (not norm)
            if skips:
                assert (engine.was_step_applied(), engine.get_lr()) == (False, rate)
                assert_identical(dense_state(engine), before)
                train(engine, num_steps=1)  # the spoiled gradients are gone
                assert gathered(engine.skipped_steps) == [1] * rank.size
                assert all(bool(value.isfinite().all()) for value in dense_state(engine).values())
