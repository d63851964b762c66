"""Estimates of each rank: closed forms where sizes divide, and a plain count element by element."""

from __future__ import annotations

from math import prod
from typing import Literal

import pytest

from sdp_deepspeed.estimate.deepspeed_bytes import (
    DeepSpeedRun,
    DeepSpeedSetup,
    Precision,
    RankEstimate,
    plain_deepspeed_estimate,
)
from sdp_deepspeed.plan.assign import assign
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Regime, Unit, UnitCost

BF16 = Precision(2, 2, 2)
FP32 = Precision(4, 4, 4)


def model(num_layers: int, width: int = 4) -> list[TensorInfo]:
    layers = [TensorInfo(f"layers.{i}.{n}", (width, width + 1), "f") for i in range(num_layers) for n in "ab"]
    return [TensorInfo("embedding", (7, width), "f"), *layers, TensorInfo("norm", (width,), "f")]


def plan_of(num_layers: int, size: int, holders: int, regime: Regime = "forward", replicas: int = 1) -> Plan:
    """A unit for each layer's two tensors; `size` ranks."""
    k = size // replicas
    units = tuple(
        Unit(f"layers.{i}", tuple(Piece(f"layers.{i}.{n}", None, 0, 20) for n in "ab")) for i in range(num_layers)
    )
    rows = assign([UnitCost(40, 160, 80)] * num_layers, [holders] * num_layers, k)
    return Plan(regime, "block", k, 0, units, rows, tuple(rank * k // size for rank in range(size)))


SUMS = Precision(2, 4, 2)
WIDE = Precision(2, 2, 4)


def deepspeed_estimates(plan: Plan, tensors: list[TensorInfo], setup: DeepSpeedSetup) -> list[RankEstimate]:
    run = DeepSpeedRun(plan, tensors, setup)
    return [run.estimate(rank) for rank in range(plan.num_ranks)]


def per_parameter(stage: int, n: int, c: float, precision: Precision, regime: Regime) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state for each parameter of units; 2C + 2C + 12/n of bf16, ZeRO-1."""
    weights = precision.weights * (1 if regime == "backward" else c)
    state = 4 * (2 + (precision.weights != 4))
    gradients = 4 / n if stage == 2 else precision.gradients * c
    return weights, gradients, state / n


def sent_per_parameter(stage: int, n: int, c: float, precision: Precision, regime: Regime, accumulation: int) -> float:
    """Gradients go to their owners, C (h - 1) / h elements with h holders; weights return to holders, or to all."""
    to_holders, to_all = c * (c * n - 1) / (c * n), (n - 1) / n
    returned = to_all if regime == "backward" else to_holders
    return to_holders * precision.wire * (accumulation if stage == 2 else 1) + returned * precision.weights


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])  # 0 runs as 1
@pytest.mark.parametrize("precision", [FP32, BF16, SUMS, WIDE], ids=["fp32", "bf16", "bf16+fp32", "wire"])
def test_units_alone_follow_the_table(
    stage: Literal[0, 1, 2], precision: Precision, regime: Regime, replicas: int
) -> None:
    """Without shared parameters, with sizes that divide, replicas or not."""
    n, c, layers = 4, 0.5, 8
    tensors = model(layers)[1:-1]
    total = sum(prod(info.shape) for info in tensors)
    expected = per_parameter(stage, n, c, precision, regime)
    sent = sent_per_parameter(stage, n, c, precision, regime, accumulation=3)
    setup = DeepSpeedSetup(stage, precision, accumulation=3)
    for rank in deepspeed_estimates(plan_of(layers, n, 2 // replicas, regime, replicas), tensors, setup):
        assert (rank.weights, rank.gradients, rank.optimizer) == tuple(total * figure for figure in expected)
        assert rank.sent == total * sent


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_state_is_counted_apart(stage: Literal[1, 2]) -> None:
    tensors, plan = model(4), plan_of(4, 4, 2)
    on_device = deepspeed_estimates(plan, tensors, DeepSpeedSetup(stage, FP32))[1]
    offloaded = deepspeed_estimates(plan, tensors, DeepSpeedSetup(stage, FP32, offload=True))[1]
    assert on_device.host_optimizer == offloaded.optimizer == 0
    assert offloaded.host_optimizer == on_device.optimizer // 8 * 16, "with a master and its gradient"
    in_gradients = on_device.gradients - offloaded.gradients  # at stage 2 they are summed in host memory
    assert (in_gradients > 0) == (stage == 2)
    assert offloaded.state == on_device.state - on_device.optimizer - in_gradients
    assert plain_deepspeed_estimate(tensors, DeepSpeedSetup(stage, FP32, offload=True), num_ranks=4).optimizer == 0


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_what_leaves_a_node(regime: Regime) -> None:
    """At C = 1: one ring of all ranks, twice for gradients, once for weights."""
    run = DeepSpeedRun(plan_of(16, 8, 2, regime, replicas=4), model(16), DeepSpeedSetup(2, FP32, accumulation=2))
    num = sum(bucket.size for bucket in run.buckets)
    assert run.sent_out_of(range(8)) == 0
    for first in (0, 4):
        assert run.sent_out_of(range(first, first + 4)) == num * 7 // 8 * 3 * 4


def test_frozen_parameters() -> None:
    tensors = [TensorInfo("w", (10,), "f"), TensorInfo("f", (6,), "f", trainable=False)]
    plan = Plan("forward", "block", 1, 0, (Unit("u", (Piece("w", None, 0, 10),)),), ((0,),), (0,))
    result = deepspeed_estimates(plan, tensors, DeepSpeedSetup(1, BF16))[0]
    assert (result.weights, result.gradients, result.optimizer) == (32, 20, 120)
    assert result.sent == 0
    assert result.state == 172
    assert deepspeed_estimates(plan, tensors, DeepSpeedSetup(2, SUMS))[0].gradients == 40


def test_plain_deepspeed() -> None:
    tensors = [TensorInfo("a", (10,), "f"), TensorInfo("b", (5,), "f")]
    stage_0 = plain_deepspeed_estimate(tensors, DeepSpeedSetup(0, FP32), num_ranks=4)
    assert (stage_0.weights, stage_0.gradients, stage_0.optimizer) == (60, 60, 8 * 15)
    stage_1 = plain_deepspeed_estimate(tensors, DeepSpeedSetup(1, BF16), num_ranks=4)  # padded to 16
    assert (stage_1.weights, stage_1.gradients, stage_1.optimizer) == (32, 30, 12 * 4)
    stage_2 = plain_deepspeed_estimate(tensors, DeepSpeedSetup(2, BF16, accumulation=3), num_ranks=4)
    assert (stage_2.weights, stage_2.gradients, stage_2.optimizer) == (32, 20, 12 * 4), "all of `a`"
    assert stage_1.sent == 3 * 2 * 11
    assert stage_2.sent == 7 * 2 * 11
    assert plain_deepspeed_estimate(tensors, DeepSpeedSetup(1, FP32), num_ranks=4).optimizer == 12 * 4
    assert plain_deepspeed_estimate(tensors, DeepSpeedSetup(1, FP32), num_ranks=1).sent == 0
