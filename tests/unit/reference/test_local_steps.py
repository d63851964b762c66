"""Local steps: torchft's DiLoCo at full coverage, and numbers derived by hand below it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Regime, Unit
from tests.reference.local_steps import LocalReference, LocalSteps
from tests.reference.virtual_workers import LossFunction, Reference
from tests.unit.reference.test_virtual_workers import A, B, S, TwoLayers, loss_of, sgd

NUM_WORKERS, EVERY, NUM_STEPS = 3, 3, 9
INNER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


class Sums(TwoLayers):
    """`(a + b + s) x`: the gradient of each weight is x."""

    def forward(self, x: float) -> torch.Tensor:
        return ((self.a + self.b + self.s) * x).sum()


def reference_of(
    plan: Plan,
    local_steps: LocalSteps,
    model: nn.Module,
    make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer] = sgd,
    loss_of: LossFunction = loss_of,
) -> LocalReference:
    def make_team(model: nn.Module, ranks: Sequence[int]) -> Reference:
        return Reference(model, plan, make_optimizer, loss_of, 0.0, is_scaled=False, ranks=ranks)

    return LocalReference(model, plan, local_steps, make_team)


def sums(regime: Regime) -> Plan:
    """Two teams: a is in the first alone (p = 1), b in both, s is shared."""
    units = tuple(Unit(name, (Piece(name, None, 0, 1),)) for name in ("a", "b"))
    return Plan(regime, "block", 2, 0, units, ((0,), (0, 1)), (0, 1))


def values(model: nn.Module) -> list[float]:
    return [parameter.item() for parameter in model.parameters()]


class Manager:
    """What DiLoCo calls of torchft's Manager; workers are threads, whose all-reduce is a mean."""

    _use_async_quorum = False

    def __init__(self, worker: int, given: dict[int, torch.Tensor], barrier: threading.Barrier) -> None:
        self._worker, self._given, self._barrier = worker, given, barrier

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        self._given[self._worker] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack([self._given[worker] for worker in range(NUM_WORKERS)]).mean(0))
        self._barrier.wait()
        return self

    def wait(self) -> None:
        pass

    def should_commit(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def register_state_dict_fn(self, *_: Any) -> None:
        pass

    disallow_state_dict_read = allow_state_dict_read = start_quorum = wait


def diloco(model: nn.Module, manager: Any, inputs: torch.Tensor, outer: LocalSteps) -> list[list[torch.Tensor]]:
    """Weights of a worker after each synchronization of torchft's."""
    from torchft.local_sgd import DiLoCo

    inner, weights = torch.optim.AdamW(model.parameters(), **INNER), []
    with DiLoCo(manager, [model], inner, outer.outer_optimizer([*model.parameters()]), sync_every=EVERY):
        for step, rows in enumerate(inputs, start=1):
            inner.zero_grad()
            model(rows).square().mean().backward()
            inner.step()  # synchronizes after every third
            if step % EVERY == 0:
                weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return weights


@pytest.mark.parametrize("outer", [(0.7, 0.9), (0.5, 0.6), (1.0, 0.0)], ids=str)
def test_full_coverage_is_the_diloco_of_torchft(outer: tuple[float, float]) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    torch.manual_seed(0)
    model, local_steps = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), LocalSteps(EVERY, *outer)
    inputs, everyone = torch.randn(NUM_STEPS, NUM_WORKERS, 2, 3), tuple(range(NUM_WORKERS))
    given, barrier = dict[int, torch.Tensor](), threading.Barrier(NUM_WORKERS, timeout=60)
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        running = [
            pool.submit(diloco, deepcopy(model), Manager(worker, given, barrier), inputs[:, worker], local_steps)
            for worker in everyone
        ]
        of_torchft = running[0].result()
    unit = Unit("first", (Piece("0.weight", None, 0, 12), Piece("0.bias", None, 0, 4)))
    plan = Plan("forward", "block", NUM_WORKERS, 0, (unit,), (everyone,), everyone)
    reference = reference_of(
        plan,
        local_steps,
        model,
        lambda named: torch.optim.AdamW(named.values(), **INNER),
        lambda model, rows: model(rows).square().mean(),
    )
    for step, rows in enumerate(inputs, start=1):
        reference.step([[own] for own in rows])
        if step % EVERY == 0:
            for parameter, expected in zip(model.parameters(), of_torchft[step // EVERY - 1], strict=True):
                # Means of deltas in fp32: a few roundings of weights near 1.
                torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


# Inner SGD with 0.1, H = 2. First interval: x is 1, 2 in team 0 and 3, 4 in team 1, so w changes by -0.3 and -0.7.
#   delta: a 0.3 (team 0 alone), b and s (0.3 + 0.7) / 2 = 0.5
# Outer SGD with 0.5 and momentum 0.5: buf = delta, and Nesterov's step is 0.5 (delta + 0.5 buf) = 0.75 delta.
#   a 2 - 0.225, b 3 - 0.375, s 5 - 0.375
# Second interval: x = 1, 1 in team 0 and 3, 3 in team 1: delta: a 0.2, b and s (0.2 + 0.6) / 2 = 0.4
#   buf: a 0.5 * 0.3 + 0.2 = 0.35, b and s 0.5 * 0.5 + 0.4 = 0.65;  step 0.5 (delta + 0.5 buf)
#   a 0.5 (0.2 + 0.175) = 0.1875, b and s 0.5 (0.4 + 0.325) = 0.3625
FIRST = [2 - 0.225, 3 - 0.375, 5 - 0.375]
SECOND = [FIRST[0] - 0.1875, FIRST[1] - 0.3625, FIRST[2] - 0.3625]


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_holders_average_and_step_from_the_anchors(regime: Regime) -> None:
    model = Sums()
    reference = reference_of(sums(regime), LocalSteps(2, 0.5, 0.5), model)
    losses, norms = reference.step([[1.0], [3.0]])
    lacked = A if regime == "backward" else 0.0  # team 1 runs a in the backward regime only
    assert losses == [[A + B + S], [3 * (lacked + B + S)]]
    assert norms == pytest.approx([math.sqrt(3), math.sqrt(2) * 3])  # a team's own elements
    losses, _ = reference.step([[2.0], [4.0]])
    assert losses[1] == pytest.approx([4 * (lacked + B + S - 0.6)])  # a is at its anchor
    assert values(model) == pytest.approx(FIRST)
    losses, _ = reference.step([[1.0], [3.0]])
    assert values(model) == pytest.approx(FIRST), "the dense model is that of the anchors"
    lacked = FIRST[0] if regime == "backward" else 0.0
    assert losses == [pytest.approx([sum(FIRST)]), pytest.approx([3 * (lacked + FIRST[1] + FIRST[2])])]
    reference.step([[1.0], [3.0]])
    assert values(model) == pytest.approx(SECOND)
    assert [values(team.model) for team in reference.teams] == [values(model)] * 2
