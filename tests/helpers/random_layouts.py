"""Random plans over random tensors: whole tensors, row slices, column slices, shared rests, odd sizes; of what no unit
cuts, half is stepped as a whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from sdp_deepspeed.layout.buckets import Bucket, build_buckets, build_segments
from sdp_deepspeed.layout.fragments import Fragment, PieceByPiece, Views
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit

# How ranks may be on nodes, by the number of ranks.
NODES: dict[str, Callable[[int], Nodes]] = {
    "one": Nodes.one,
    "halves": lambda size: Nodes.of([2 * rank // size for rank in range(size)]),
    "in turn": lambda size: Nodes.of([rank % 3 for rank in range(size)]),
    "1 + 2 + 3": lambda size: Nodes.of([math.isqrt(2 * rank) for rank in range(size)]),
    "alone": lambda size: Nodes.of(range(size)),
}
SIZES = (1, 2, 3, 5, 7, 11)
# Matrices of a layer of LLaMA 7B with 8 key/value heads, by unit; elements divided by 2**16.
ATTENTION, MLP = {"q": 256, "k": 64, "v": 64, "o": 256}, {"gate": 688, "up": 688, "down": 688}
MOST_BUCKETS = 50  # of a random limit: each is a collective of all ranks, and hundreds tell no more than these


@dataclass(frozen=True)
class Layout:
    """Dense tensors, a plan of their pieces, and what the exchange makes of them."""

    size: int
    tensors: tuple[TensorInfo, ...]
    plan: Plan
    max_elements: int
    on_nodes: Nodes | None = None

    @property
    def nodes(self) -> Nodes:
        return self.on_nodes or Nodes.one(self.size)

    @cached_property
    def segments(self) -> list[Segment]:
        limit = self.max_elements
        return build_segments(self.tensors, self.plan, max_elements=limit, nodes=self.nodes, max_waiting=4 * limit)

    @cached_property
    def buckets(self) -> list[Bucket]:
        all_receive_weights = self.plan.regime == "backward"
        return build_buckets(
            self.segments, self.nodes, max_elements=self.max_elements, all_receive_weights=all_receive_weights
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.tensors}


@cache
def random_layout(seed: int, size: int, regime: str = "forward") -> Layout:
    """The same for the same arguments; the regime changes nothing but itself."""
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
    cut, draw = {p.parameter for unit in units for p in unit.pieces if p.dim is not None}, random.Random(seed)
    tensors = [replace(info, is_whole=draw.random() < 0.5 and info.name not in cut) for info in tensors]
    plan = Plan(regime, "block", size, p, 0, tuple(units), tuple(holders), tuple(range(size)))
    num_elements = sum(math.prod(info.shape) for info in tensors)
    return Layout(size, tuple(tensors), plan, max(chance.choice((1, 7, 40, 10_000)), num_elements // MOST_BUCKETS))


def placed(layout: Layout, nodes: str) -> Layout:
    """The same on these nodes."""
    return replace(layout, on_nodes=NODES[nodes](layout.size))


def without_whole(layout: Layout) -> Layout:
    """The same, all of it stepped element by element."""
    return replace(layout, tensors=tuple(replace(info, is_whole=False) for info in layout.tensors))


def _units_of(info: TensorInfo, chance: random.Random) -> list[Unit]:
    """Nothing (shared), the whole tensor, or some slices of one dim with shared gaps between them."""
    cut = chance.choice((None, "whole", 0, len(info.shape) - 1))
    if cut is None:
        return []
    if cut == "whole":
        return [Unit(info.name, (Piece(info.name, None, 0, math.prod(info.shape)),))]
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


def views_of(tensors: Mapping[str, torch.Tensor | None]) -> Views:
    """Views of pieces in dense tensors."""

    def view(piece: Piece) -> torch.Tensor | None:
        tensor = tensors[piece.parameter]
        return None if tensor is None else piece.narrow(tensor)

    return PieceByPiece(view)


def indices(fragment: Fragment, shape: tuple[int, ...]) -> torch.Tensor:
    """Where the fragment's elements lie in the flat dense tensor, in the order in which they travel: index by index of
    the cut dim, each row-major."""
    piece, numbers = fragment.piece, torch.arange(math.prod(shape)).view(shape)
    if piece.dim is not None:
        numbers = torch.stack(numbers.unbind(piece.dim)[piece.start : piece.start + piece.length])
    return numbers.reshape(-1)[fragment.start : fragment.stop]


def random_decoder(num_ranks: int, num_holders: int, num_layers: int, seed: int) -> tuple[list[TensorInfo], Plan]:
    """Matrices that are stepped as a whole, norms and a head that are not. Units have random holders, of those that
    have fewest, as in balanced plans."""
    draw, tensors, units, holders = random.Random(seed), list[TensorInfo](), list[Unit](), list[tuple[int, ...]]()
    counts = [0] * num_ranks
    for layer in range(num_layers):
        for part in (ATTENTION, MLP):
            own = [TensorInfo(f"{layer}.{name}", (n,), torch.float32, 0, is_whole=True) for name, n in part.items()]
            own.insert(0, TensorInfo(f"{layer}.{min(part)}.norm", (1,), torch.float32, 1))
            tensors += own
            units.append(Unit(f"{layer}.{min(part)}", tuple(Piece(i.name, None, 0, i.shape[0]) for i in own)))
            order = sorted(range(num_ranks), key=lambda rank: (counts[rank], draw.random()))
            holders.append(tuple(sorted(order[:num_holders])))
            for rank in holders[-1]:
                counts[rank] += 1
    tensors.append(TensorInfo("head", (2000,), torch.float32, 1))
    everyone = tuple(range(num_ranks))
    return tensors, Plan("forward", "block", num_ranks, num_holders, 0, tuple(units), tuple(holders), everyone)


def most_kept(tensors: Sequence[TensorInfo], plan: Plan, buckets: Sequence[Bucket]) -> int:
    """Elements of gradients that are there and have not left, on the rank that has most of them at any time of a
    backward pass: a bucket leaves after those before it, and a gradient is freed with the last bucket that has a part.
    """
    names = [[fragment.piece.parameter for s in bucket.segments for fragment in s.fragments] for bucket in buckets]
    last = {name: index for index, of_bucket in enumerate(names) for name in of_bucket}
    ranks, kept, most = torch.arange(len(plan.subnetwork_of_rank)), torch.zeros(len(plan.subnetwork_of_rank)), 0
    sizes = {info.name: torch.full_like(kept, math.prod(info.shape)) for info in tensors}
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces:
            sizes[piece.parameter] *= torch.isin(ranks, torch.tensor(plan.ranks_of(index)))
    there, num_left = set[str](), 0
    for info in reversed(tensors):
        there.add(info.name)
        kept += sizes[info.name]
        most = max(most, int(kept.max()))
        while num_left < len(names) and there.issuperset(names[num_left]):
            kept -= sum(sizes[name] for name in set(names[num_left]) if last[name] == num_left)
            num_left += 1
    assert not kept.any(), "all has left"
    return most
