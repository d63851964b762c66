"""The phases' table: figures of each worker, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.engine.apply_plan import ChosenPlan
from sdp_deepspeed.engine.schedule_table import PhaseRow, schedule_table, setup_of
from sdp_deepspeed.estimate.per_rank import estimate
from sdp_deepspeed.optimizer.settings import Offload, OptimizerSettings
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors
from sdp_deepspeed.schedule import Phase
from sdp_deepspeed.sizes import mib_text
from tests.helpers.models import llama

SETTINGS = OptimizerSettings(1, clip=0.0, wire_dtype=torch.float32)


def optimized(model: nn.Module) -> list[TensorInfo]:
    return [replace(info, group=0) for info in dense_tensors(model)]


def row(phase: Phase, settings: OptimizerSettings = SETTINGS, **block: Any) -> PhaseRow:
    model = llama(4)
    config = parse({KEY: block})
    assert config is not None
    plan, warnings = plan_model(model, config, 4)
    chosen = ChosenPlan(plan, ("one",) * 4, unit_costs(model, plan.units), warnings)
    optimizer = torch.optim.Adam(model.parameters())
    setup = setup_of(settings, torch.float32, optimizer, accumulation=2)
    return PhaseRow.of(phase, chosen, optimized(model), setup, (3, 2))


HALF = row(Phase(1, 40, {}), coverage=0.5)
DENSE = row(Phase(41, None, {}), coverage=1.0)


def test_a_line_for_each_phase() -> None:
    title, heading, half, dense, moves, draws = schedule_table([HALF, DENSE], 10).split("\n")
    assert "of each worker" in title
    assert heading.split()[:3] == ["steps", "coverage", "mode"]
    assert half.split()[:8] == ["1", "to", "40", "0.5", "forward", "x", "block", "1"]
    assert dense.split()[:9] == ["41", "to", "the", "end", "1", "forward", "x", "block", "1"]
    assert "3 x 2" in half
    assert half.endswith(" 0.50x")
    assert dense.endswith(" 1.00x")
    assert draws.strip() == "another assignment is drawn every 10 steps"
    most = max(map(sum, zip(HALF.states, DENSE.states, strict=True)))
    assert most < 2 * max(DENSE.states), "a whole plan is not drawn anew"
    both = mib_text(most)
    assert moves.strip() == f"while the plan changes: at most {both}, both states, and two buckets"
    assert len(schedule_table([HALF], None).split("\n")) == 3


def test_what_is_in_host_memory_is_beside_it() -> None:
    offloaded = row(Phase(1, None, {}), replace(SETTINGS, offload=Offload(pin_memory=False)), coverage=0.5)
    for own, beside in zip(offloaded.ranks, HALF.ranks, strict=True):
        assert (own.optimizer, own.weights) == (0, beside.weights)
    assert offloaded.states == tuple(rank.weights for rank in offloaded.ranks)
    of_host = {mib_text(rank.host_optimizer) for rank in offloaded.ranks}
    assert offloaded.cells()[5].split(" and ")[1] == f"{of_host.pop()} of its host"
    assert not of_host
    assert "host" not in HALF.cells()[5]


def test_what_may_not_fit_while_the_plan_changes_is_said() -> None:
    most = max(map(sum, zip(HALF.states, DENSE.states, strict=True)))
    assert "it may end there" not in schedule_table([HALF, DENSE], None, most)
    assert mib_text(most) in schedule_table([HALF, DENSE], None)
    assert "more than its GPU has: it may end there" in schedule_table([HALF, DENSE], None, most - 1)


def test_figures_are_those_of_the_estimate() -> None:
    model = llama(4)
    ranks = estimate(
        DENSE.plan, optimized(model), setup_of(SETTINGS, torch.float32, torch.optim.Adam([torch.zeros(1)]), 2)
    )
    assert DENSE.ranks == ranks
    assert max(rank.state for rank in HALF.ranks) < min(rank.state for rank in DENSE.ranks)


def test_a_backward_worker_leaves_out_half_of_the_weight_gradients() -> None:
    assert row(Phase(1, None, {}), coverage=0.5, regime="backward").flops == pytest.approx((5 / 6,) * 4)


def test_what_does_not_fit_is_refused() -> None:
    needed = max(rank.state + rank.buffers + rank.step_gradients for rank in HALF.ranks)
    HALF.refuse_too_large(needed)
    HALF.refuse_too_large(None)
    with pytest.raises(
        ValueError, match=r"model state and buffers take .* MiB on a rank, more than the .* MiB of its GPU"
    ):
        HALF.refuse_too_large(needed - 1)


def test_workers_that_differ_have_a_range() -> None:
    rules = [{"units": r"layers\.0\.", "holders": 1}, {"holders": 3}]
    mixed = row(Phase(1, None, {}), holders=rules)
    low, high = min(mixed.flops), max(mixed.flops)
    assert low < high
    assert mixed.cells()[7] == f"{low:.2f}x to {high:.2f}x"
    assert " to " not in HALF.cells()[7]


def test_a_setup_is_what_the_engine_has() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    settings = OptimizerSettings(2, clip=0.0, wire_dtype=torch.float32, accumulate_in_fp32=True, max_in_flight=1)
    setup = setup_of(settings, torch.bfloat16, sgd, 3)
    assert (setup.stage, setup.accumulation, setup.overlap) == (2, 3, True)
    precision = setup.precision
    assert (precision.weights, precision.gradients, precision.wire, precision.num_moments) == (2, 4, 4, 1)
