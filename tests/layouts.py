"""Random plans over random tensors: whole tensors, row slices, column slices, shared rests, odd sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from sdp_deepspeed.plan import Plan
from sdp_deepspeed.segments import Bucket, Segment, TensorInfo, build_buckets, build_segments
from sdp_deepspeed.units import Piece, Unit

SIZES = (1, 2, 3, 5, 7, 11)


@dataclass(frozen=True)
class Layout:
    """Dense tensors, a plan of their pieces, and what the exchange makes of them."""

    size: int
    tensors: tuple[TensorInfo, ...]
    plan: Plan
    max_elements: int

    @property
    def segments(self) -> list[Segment]:
        return build_segments(self.tensors, self.plan, max_elements=self.max_elements)

    @property
    def buckets(self) -> list[Bucket]:
        return build_buckets(self.segments, size=self.size, max_elements=self.max_elements)

    def shape(self, name: str) -> tuple[int, ...]:
        return next(info.shape for info in self.tensors if info.name == name)


def random_layout(seed: int, size: int) -> Layout:
    """The same for the same arguments."""
    chance = random.Random(seed)
    tensors, units = [], []
    for index in range(chance.randint(3, 9)):
        shape = tuple(chance.choice(SIZES) for _ in range(chance.choice((1, 2, 2, 3))))
        info = TensorInfo(f"t{index}", shape, chance.choice((torch.float32, torch.bfloat16)), chance.randrange(2))
        tensors.append(info)
        units += _units_of(info, chance)
    p = chance.randint(1, size)
    holders = [tuple(sorted(chance.sample(range(size), p))) for _ in units]
    for rank in range(size):  # one row for each rank, since a plan leaves nobody without a unit
        units.append(Unit(f"rows[{rank}]", (Piece("rows", 0, rank, 1),)))
        holders.append(tuple(sorted((rank + i) % size for i in range(p))))
    tensors.append(TensorInfo("rows", (size, 3), torch.float32, 0))
    plan = Plan("forward", "block", size, p, 0, tuple(units), tuple(holders), tuple(range(size)))
    return Layout(size, tuple(tensors), plan, chance.choice((1, 7, 40, 10_000)))


def _units_of(info: TensorInfo, chance: random.Random) -> list[Unit]:
    """Nothing (shared), the whole tensor, or some slices of one dim with shared gaps between them."""
    cut = chance.choice((None, "whole", 0, len(info.shape) - 1))
    if cut is None:
        return []
    if cut == "whole":
        elements = 1
        for length in info.shape:
            elements *= length
        return [Unit(info.name, (Piece(info.name, None, 0, elements),))]
    assert isinstance(cut, int)
    units, start = [], 0
    while start < info.shape[cut]:
        length = min(chance.choice((1, 2, 3)), info.shape[cut] - start)
        if chance.random() < 0.7:
            units.append(Unit(f"{info.name}[{start}]", (Piece(info.name, cut, start, length),)))
        start += length
    return units


def random_tensors(layout: Layout, seed: int, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Dense tensors by name; `dtype` overrides their own."""
    generator = torch.Generator().manual_seed(seed)
    return {info.name: torch.randn(info.shape, generator=generator).to(dtype or info.dtype) for info in layout.tensors}
