"""Units from their holders to the ranks that lack them, on threads over gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from math import prod

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.unit_fetcher import UnitFetcher
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.random_layouts import NODES, Layout, placed, random_layout, random_tensors
from tests.helpers.threads import Ranks

Fetched = dict[Piece, torch.Tensor]


@pytest.fixture(scope="module", params=[2, 3, 8])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@pytest.fixture(scope="module")
def eight() -> Ranks:
    return Ranks(8)


def fetcher_of(layout: Layout, sets: Sequence[Sequence[int]], communicator: Communicator) -> UnitFetcher:
    views = PieceViews(random_tensors(layout, 0))
    model = RankModel(layout.plan, tuple(layout.tensors), views, communicator.rank, on_nodes=layout.nodes)
    return UnitFetcher(model, sets, communicator, device=torch.device("cpu"))


def fetched(layout: Layout, sets: Sequence[Sequence[int]], communicator: Communicator) -> list[Fetched]:
    """Per set what this rank lacked; it gives what it holds from rank-independent tensors and nothing else."""
    dense, rank, plan = random_tensors(layout, 0), communicator.rank, layout.plan
    held = {piece for u, unit in enumerate(plan.units) if plan.holds_rank(u, rank) for piece in unit.pieces}
    fetcher, result = fetcher_of(layout, sets, communicator), []

    def held_view(piece: Piece) -> torch.Tensor:
        assert piece in held, f"rank {rank} reads {piece}, which it lacks"
        view: torch.Tensor = piece.narrow(dense[piece.parameter])
        return view

    for index, units in enumerate(sets):
        lacking = [piece for unit in units for piece in plan.units[unit].pieces if piece not in held]
        # Slices of larger tensors, as when a branch is put together in place.
        wholes = {piece.parameter: torch.full_like(dense[piece.parameter], torch.nan) for piece in lacking}
        targets: Fetched = {piece: piece.narrow(wholes[piece.parameter]) for piece in lacking}
        deque(fetcher.fetch(index, held_view, partial(dict, targets), num_rounds=1 + index % 3), maxlen=0)
        assert {name: int(whole.isnan().sum()) for name, whole in wholes.items()} == {
            name: whole.numel() - sum(p.num_elements(whole.shape) for p in lacking if p.parameter == name)
            for name, whole in wholes.items()
        }, "more was written than is lacking, or less"
        result.append(targets)
    return result


@pytest.mark.parametrize(("seed", "nodes"), [*enumerate(NODES)])
def test_everything_lacking_arrives_at_its_place(ranks: Ranks, seed: int, nodes: str) -> None:
    """Rows, columns, whole tensors and both dtypes; sets of one unit, of several, and with the same unit again."""
    layout = placed(random_layout(seed, len(ranks.groups)), nodes)
    every = range(len(layout.plan.units))
    sets = [*[[unit] for unit in every[::3]], list(every), list(every[1:3]), []]
    dense = random_tensors(layout, 0)
    for rank, results in enumerate(ranks.run(lambda communicator: fetched(layout, sets, communicator))):
        for units, targets in zip(sets, results, strict=True):
            lacking = [unit for unit in units if not layout.plan.holds_rank(unit, rank)]
            assert targets.keys() == {piece for unit in lacking for piece in layout.plan.units[unit].pieces}
            for piece, value in targets.items():
                assert torch.equal(value, piece.narrow(dense[piece.parameter]))


def one_unit_layout(shape: tuple[int, ...], holders: tuple[int, ...], piece: Piece) -> Layout:
    """The unit `u0` on `holders`, and units that give each of eight ranks something."""
    rest = [tuple(sorted((rank + i) % 8 for i in range(len(holders)))) for rank in range(8)]
    units = (Unit("u0", (piece,)), *[Unit(f"u{i + 1}", (Piece(f"u{i + 1}", None, 0, 1),)) for i in range(8)])
    plan = Plan("forward", "block", 8, len(holders), 0, units, (holders, *rest), tuple(range(8)))
    return Layout(8, (TensorInfo("w", shape, torch.float32, 0),), plan, 100)


@pytest.mark.parametrize(
    ("shape", "piece"), [((11,), Piece("w", None, 0, 11)), ((3, 11), Piece("w", 1, 0, 11))], ids=["whole", "columns"]
)
def test_eleven_over_three_holders(eight: Ranks, shape: tuple[int, ...], piece: Piece) -> None:
    """A number that shards and rounds do not divide, over holders that are not neighbors."""
    holders = (2, 3, 7)
    layout = one_unit_layout(shape, holders, piece)
    for rank, (targets,) in enumerate(eight.run(lambda communicator: fetched(layout, [[0]], communicator))):
        assert targets.keys() == (set() if rank in holders else {piece})
        for value in targets.values():
            assert torch.equal(value, random_tensors(layout, 0)["w"])


@pytest.mark.parametrize("nodes", ["one", "halves", "in turn"])
@pytest.mark.parametrize("num_holders", [1, 2, 4, 7])
def test_a_holder_packs_at_most_half_of_what_it_holds(eight: Ranks, num_holders: int, nodes: str) -> None:
    """So that fetching needs little beside what is fetched, also where one holder serves seven others."""
    shape = (56, 10)
    layout = placed(one_unit_layout(shape, tuple(range(num_holders)), Piece("w", None, 0, prod(shape))), nodes)
    eight.run(lambda communicator: fetched(layout, [[0]], communicator))
    packed = [max(group.sent) for group in eight.groups]
    assert sum(sum(group.sent) for group in eight.groups) == prod(shape) * (8 - num_holders)
    # A holder's shard of a round is rounded up to whole elements, for each of the others.
    assert all(most <= prod(shape) / 2 + 8 for most in packed[:num_holders])
    assert nodes != "one" or (all(packed[:num_holders]) and not any(packed[num_holders:]))
