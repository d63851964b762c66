"""Random holder sets over gloo, where each collective waits for its ranks: whoever is late, no step hangs."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from sdp_deepspeed.fsdp import sharded_model_of
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model
from tests.helpers.collective_log import Issued, collectives_of_fsdp
from tests.helpers.models import parsed
from tests.helpers.ranks import Rank
from tests.helpers.sharded import Layer, sharded

pytestmark = [pytest.mark.slow, pytest.mark.world(4)]

NUM_LAYERS = 4


class Tower(nn.Module):
    """Layers, of which `stretch` are checkpointed together (0: none)."""

    def __init__(self, *, parallel: bool, stretch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [(12 * (2 * index + 1), 12 * (2 * index + 2)) for index in range(NUM_LAYERS)]
        self.layers = nn.ModuleList(Layer(*own, parallel=parallel) for own in widths)
        self.head = nn.Linear(4, 1)
        self.stretch = stretch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.stretch or 1
        for start in range(0, NUM_LAYERS, step):
            run = nn.Sequential(*self.layers[start : start + step])
            x = checkpoint(run, x, use_reentrant=False) if self.stretch else run(x)
        result: torch.Tensor = self.head(x)
        return result


def write_random_plan(model: nn.Module, rank: Rank, seed: int) -> str:
    draw, units = random.Random(seed), made_plan(model, rank).units
    while True:
        holders = [tuple(sorted(draw.sample(range(rank.size), draw.randint(1, 3)))) for _ in units]
        if len({len(own) for own in holders}) > 1 and len({rank for own in holders for rank in own}) == rank.size:
            return write_plan(model, rank, holders, str(seed))


def write_plan(model: nn.Module, rank: Rank, holders: Sequence[tuple[int, ...]], name: str) -> str:
    plan = made_plan(model, rank)
    path = rank.folder / f"plan-{rank.rank}-{name}.json"
    replace(plan, holders=tuple(holders)).save(path)
    return str(path)


def made_plan(model: nn.Module, rank: Rank) -> Plan:
    return plan_model(model, parsed(holders=2), rank.size)[0]


def delays(rank: Rank, seed: int, seconds: float = 0.01) -> AbstractContextManager[list[Issued]]:
    """Before each collective of FSDP2's a rank waits up to some seconds, later ranks longer; yields what it issued."""
    draw = random.Random(rank.rank + 100 * seed)
    return collectives_of_fsdp(lambda: time.sleep(draw.random() * seconds * (rank.rank + 1)))


@pytest.mark.parametrize("first", range(0, 50, 10))
@pytest.mark.parametrize(("parallel", "stretch"), [(False, 0), (True, 0), (False, 1), (False, 2)])
def test_runs_to_its_end(rank: Rank, parallel: bool, stretch: int, first: int) -> None:
    """The input needs no gradient, as after frozen embeddings; the first layers' units have to be told apart."""
    for seed in range(first, first + 10):
        model: Any = Tower(parallel=parallel, stretch=stretch)
        model = sharded(model, {"assignment": write_random_plan(model, rank, seed)})
        torch.manual_seed(rank.rank)
        with delays(rank, seed, 0.002) as issued:
            for number in (1, 2, 1):  # of graphs that are there together
                losses = [model(torch.randn(2, 4)).sum() for _ in range(number)]
                for loss in losses:
                    loss.backward()
        assert issued
        stored = sharded_model_of(model)
        assert all(p.grad is not None for modules in stored.fsdp_groups for m in modules for p in m.parameters())
        dist.barrier()
        stored.groups.close()


FROZEN: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "the first layer": (r"layers\.0\..*", [(0,), (0, 1), (2, 3), (2, 3), (2, 3), (2, 3)]),
    "each second branch": (r".*(two|norm_2)\..*", [(0,), (0, 1), (2, 3), (2, 3)]),
}


def test_frozen_parameters(rank: Rank) -> None:
    """Of branches below, or between, the units: ranks that lack some of these still gather what others gather."""
    for frozen, holders in FROZEN.values():
        model: Any = Tower(parallel=False, stretch=0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.fullmatch(frozen, name))
        model = sharded(model, {"assignment": write_plan(model, rank, holders, "frozen")})
        with delays(rank, 0):
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.numel()}
        assert all((gradient is None) == bool(re.fullmatch(frozen, name)) for name, gradient in gradients.items())
