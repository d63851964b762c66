"""The oracle itself: every number here is derived by hand in the comments."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Regime, Unit
from tests.reference import virtual_workers
from tests.reference.virtual_workers import divisors, masked_average

A, B, S = 2.0, 3.0, 5.0
# Models here have no described branches to scale.
Reference = partial(virtual_workers.Reference, is_scaled=False)
local_gradients = partial(virtual_workers.local_gradients, is_scaled=False)


class TwoLayers(nn.Module):
    """`s (1 + b) (1 + a) x`: two residual layers of one weight each and a shared head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([A]))
        self.b = nn.Parameter(torch.tensor([B]))
        self.s = nn.Parameter(torch.tensor([S]))

    def forward(self, x: float) -> torch.Tensor:
        hidden = x + self.a * x
        hidden = hidden + self.b * hidden
        return (self.s * hidden).sum()


class Neurons(nn.Module):
    """`sum over j of u_j v_j x + c`: neuron j is row j of `v` and column j of `u`; `c` is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor([[1.0], [2.0], [4.0]]))
        self.u = nn.Parameter(torch.tensor([[3.0, 5.0, 7.0]]))
        self.c = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: float) -> torch.Tensor:
        return (self.u @ (self.v * x)).sum() + self.c


def loss_of(model: nn.Module, batch: float) -> torch.Tensor:
    return model(batch)


def sgd(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1)


def plan_of(
    units: tuple[Unit, ...], holders: tuple[tuple[int, ...], ...], *, regime: Regime = "forward", k: int = 3, r: int = 1
) -> Plan:
    ranks = tuple(subnetwork for subnetwork in range(k) for _ in range(r))
    return Plan(regime, "block", k, 0, units, holders, ranks)


def two_layers(regime: Regime) -> Plan:
    """k = 3, p = 2: worker 0 lacks b, worker 1 has both, worker 2 lacks a."""
    units = tuple(Unit(name, (Piece(name, None, 0, 1),)) for name in ("a", "b"))
    return plan_of(units, ((0, 1), (1, 2)), regime=regime)


def neurons(row: str, column: str, num: int) -> tuple[Unit, ...]:
    return tuple(Unit(f"neuron{j}", (Piece(row, 0, j, 1), Piece(column, 1, j, 1))) for j in range(num))


def average_of(model: nn.Module, plan: Plan, batches: tuple[float, ...]) -> dict[str, torch.Tensor]:
    gradients = [local_gradients(model, plan, rank, [x], loss_of)[1] for rank, x in enumerate(batches)]
    return masked_average(model, plan, gradients)


# Forward regime, x = 1, 2, 4. A worker's loss is s (1+b) (1+a) x with the weight that it lacks set to zero.
#   worker 0 (b = 0): da = s x = 5,             ds = (1+a) x = 3
#   worker 1:         da = s (1+b) x = 40,      db = s (1+a) x = 30,  ds = (1+a) (1+b) x = 24
#   worker 2 (a = 0): db = s x = 20,            ds = (1+b) x = 16
# Backward regime: the dense gradient da = 20 x, db = 15 x, ds = 12 x, kept by the holders only.
#   a on workers 0 and 1: 20, 40;  b on workers 1 and 2: 30, 60;  s on all: 12, 24, 48
EXPECTED = {
    "forward": {"a": (5 + 40) / 2, "b": (30 + 20) / 2, "s": (3 + 24 + 16) / 3},
    "backward": {"a": (20 + 40) / 2, "b": (30 + 60) / 2, "s": (12 + 24 + 48) / 3},
}
LOSSES = {"forward": [15.0, 120.0, 80.0], "backward": [60.0, 120.0, 240.0]}


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("clip", [0.0, 10.0])
def test_one_step_of_sgd(regime: Regime, clip: float) -> None:
    model = TwoLayers()
    losses, total = Reference(model, two_layers(regime), sgd, loss_of, clip).step([[1.0], [2.0], [4.0]])
    assert [own[0] for own in losses] == LOSSES[regime]
    size = math.sqrt(sum(value**2 for value in EXPECTED[regime].values()))
    assert total == pytest.approx(size, rel=1e-6)
    factor = clip / size if clip else 1.0
    for (name, start), parameter in zip([("a", A), ("b", B), ("s", S)], model.parameters(), strict=True):
        assert parameter.item() == pytest.approx(start - 0.1 * factor * EXPECTED[regime][name], rel=1e-5), name


def test_replicas_count_as_holders() -> None:
    """k = 2, r = 2: each neuron of worker 0 is on ranks 0 and 1, so its divisor is p r = 2, the shared one's 4."""
    plan = plan_of(neurons("v", "u", 2), ((0,), (1,)), k=2, r=2)
    counts = divisors(Neurons(), plan)
    assert counts["u"].tolist() == [[2.0, 2.0, 4.0]]
    # neuron 0 from x = 1, 3; neuron 1 from x = 5, 7; neuron 2 is in no unit, so shared by 1, 3, 5, 7
    average = average_of(Neurons(), plan, (1.0, 3.0, 5.0, 7.0))
    assert average["u"].tolist() == [[1 * 2.0, 2 * 6.0, 4 * 4.0]]
