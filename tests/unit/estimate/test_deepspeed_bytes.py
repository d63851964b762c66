"""Estimates of each rank by hand; ranks/estimate has them beside what two ranks hold and send."""

from __future__ import annotations

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
from sdp_deepspeed.units import Piece, Unit, UnitCost

BF16 = Precision(2, 2, 2)
FP32 = Precision(4, 4, 4)


def model(num_layers: int, width: int = 4) -> list[TensorInfo]:
    layers = [TensorInfo(f"layers.{i}.{n}", (width, width + 1), "f") for i in range(num_layers) for n in "ab"]
    return [TensorInfo("embedding", (7, width), "f"), *layers, TensorInfo("norm", (width,), "f")]


def plan_of(num_layers: int, size: int, holders: int) -> Plan:
    """A unit for each layer's two tensors; `size` ranks."""
    units = tuple(
        Unit(f"layers.{i}", tuple(Piece(f"layers.{i}.{n}", None, 0, 20) for n in "ab")) for i in range(num_layers)
    )
    rows = assign([UnitCost(40, 160, 80)] * num_layers, [holders] * num_layers, size)
    return Plan("forward", "block", size, 0, units, rows, tuple(range(size)))


SUMS = Precision(2, 4, 2)


def deepspeed_estimates(plan: Plan, tensors: list[TensorInfo], setup: DeepSpeedSetup) -> list[RankEstimate]:
    run = DeepSpeedRun(plan, tensors, setup)
    return [run.estimate(rank) for rank in range(plan.num_ranks)]


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
