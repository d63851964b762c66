"""What FSDP2 itself issues on each rank of a small sharded model, recorded one rank after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sdp_deepspeed.fsdp.collective_order import order_collectives
from sdp_deepspeed.fsdp.holder_meshes import make_meshes
from sdp_deepspeed.fsdp.pieces import ShardedUnit
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.helpers.collective_log import Issued, collectives_of_fsdp

ROWS = 12  # of unit 0; each later unit has that many more, so that no two collectives of a group are alike
Holders = Sequence[tuple[int, ...]]


class Scale(nn.Module):
    """Half of a unit: its backward needs its input and its parameter, as a layer's does."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum(0)


class HandsOn(nn.Module):
    """A lacking norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Zeros(nn.Module):
    """A lacking body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class Layer(nn.Module):
    """Two units, each a norm and a body; the output is a sum, of which backward needs nothing. With `crossed` both
    norms run first."""

    def __init__(self, first: int, *, crossed: bool) -> None:
        super().__init__()
        rows = ROWS * (first + 1)
        self.norm_1, self.one = Scale(rows // 2), Scale(rows // 2)
        self.norm_2, self.two = Scale((rows + ROWS) // 2), Scale((rows + ROWS) // 2)
        self.crossed = crossed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.crossed:
            first, second = self.norm_1(x), self.norm_2(x)
            return x + self.one(first) + self.two(second)
        x = x + self.one(self.norm_1(x))
        return x + self.two(self.norm_2(x))


class Tower(nn.Module):
    """Layers, of which `stretch` are checkpointed together (0: none)."""

    def __init__(self, num_layers: int, *, crossed: bool, stretch: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(2 * index, crossed=crossed) for index in range(num_layers))
        self.head = nn.Linear(2, 1)
        self.stretch = stretch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.layers), self.stretch or 1):
            run = nn.Sequential(*self.layers[start : start + (self.stretch or 1)])
            x = checkpoint(run, x, use_reentrant=False) if self.stretch else run(x)
        result: torch.Tensor = self.head(x)
        return result


def recorded(
    holders: Holders,
    *,
    crossed: bool = False,
    stretch: int = 0,
    num_passes: int = 1,
    order: Callable[[Any], None] = order_collectives,
) -> list[list[Issued]]:
    """A step's collectives of FSDP2 on each rank.

    Args:
        holders: of each unit, two units a layer.
        num_passes: forward passes, before one backward of all of them.
        order: what is done to the sharded model first.
    """
    size = 1 + max(rank for own in holders for rank in own)
    return [
        _on_one(rank, size, holders, Tower(len(holders) // 2, crossed=crossed, stretch=stretch), order, num_passes)
        for rank in range(size)
    ]


def _on_one(
    rank: int, size: int, holders: Holders, model: Any, order: Callable[[Any], None], num_passes: int
) -> list[Issued]:
    with _process(rank, size):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
        meshes, _ = make_meshes(mesh, holders)
        units = []
        for index, own in enumerate(holders):
            layer, number = model.layers[index // 2], ("one", "two")[index % 2]
            norm = f"norm_{1 + index % 2}"
            if rank in own:
                fully_shard([getattr(layer, norm), getattr(layer, number)], mesh=meshes[own])
            else:
                setattr(layer, norm, HandsOn())
                setattr(layer, number, Zeros())
            modules = (getattr(layer, norm), getattr(layer, number)) if rank in own else ()
            ends = tuple(f"layers.{index // 2}.{name}" for name in (norm, number))
            units.append(ShardedUnit(str(index), own, modules, (), (ends[0], ends[1])))
        fully_shard(model, mesh=mesh)
        order(SimpleNamespace(module=model, units=units, held_units=[unit for unit in units if unit.is_held]))
        with collectives_of_fsdp() as log:
            torch.stack([model(torch.ones(1, 2)).sum() for _ in range(num_passes)]).sum().backward()
        return log


@contextmanager
def _process(rank: int, size: int) -> Iterator[None]:
    """This process as one of `size` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
