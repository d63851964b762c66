"""What the host does in a step follows tensors and holder sets, not fragments times peers; lists are made once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange import exchange as exchange_module
from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.layout.buckets import Bucket, build_buckets, build_segments
from sdp_deepspeed.layout.cuts import Location, Moves
from sdp_deepspeed.layout.fragments import num_elements
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.places import PieceViews, side_by_side
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.nobody import Nobody
from tests.helpers.torch_calls import Calls

META = torch.device("meta")
PER_NODE, NUM_SETS, WIDTH = 4, 12, 8


@dataclass(frozen=True)
class Twin:
    """A small twin of a large model cut by neurons, as rank 0 has it: in each layer a tensor cut by rows and one cut by
    columns, each in as many units as there are groups, half of which a rank holds; nodes of four."""

    num_ranks: int
    num_layers: int = 2
    num_groups: int = 24

    @property
    def nodes(self) -> Nodes:
        return Nodes.of([rank // PER_NODE for rank in range(self.num_ranks)])

    def pieces(self, layer: int, group: int) -> tuple[Piece, Piece]:
        return Piece(f"up{layer}", 0, 2 * group, 2), Piece(f"down{layer}", 1, 2 * group, 2)

    def tensors(self) -> dict[str, torch.Tensor]:
        cut = 2 * self.num_groups
        shapes = {"up": (cut, WIDTH), "down": (WIDTH, cut)}
        return {
            f"{name}{layer}": torch.empty(shape, dtype=torch.bfloat16, device=META)
            for layer in range(self.num_layers)
            for name, shape in shapes.items()
        }

    def plan(self) -> Plan:
        """Of the holder sets each is half of the ranks; the rank itself is in every second one."""
        chance = random.Random(0)
        sets = []
        for number in range(NUM_SETS):
            others = chance.sample(range(1, self.num_ranks), self.num_ranks // 2 - (number % 2 == 0))
            sets.append(tuple(sorted([0] * (number % 2 == 0) + others)))
        both = [(layer, group) for layer in range(self.num_layers) for group in range(self.num_groups)]
        units = tuple(Unit(f"{layer}.{group}", self.pieces(layer, group)) for layer, group in both)
        holders = tuple(sets[group % NUM_SETS] for _, group in both)
        ranks = tuple(range(self.num_ranks))
        return Plan("forward", "neuron", self.num_ranks, self.num_ranks // 2, 0, units, holders, ranks)

    def buckets(self, max_elements: int) -> list[Bucket]:
        tensors = [TensorInfo(name, tuple(t.shape), t.dtype, 0) for name, t in self.tensors().items()]
        segments = build_segments(tensors, self.plan(), max_elements=max_elements, nodes=self.nodes)
        return build_buckets(segments, self.nodes, max_elements=max_elements)

    def views(self) -> PieceViews:
        """Of what it stores; gradients are laid out alike."""
        dense = self.tensors()
        views = PieceViews(dense)
        held = [group for group in range(self.num_groups) if group % NUM_SETS % 2 == 0]
        for layer in range(self.num_layers):
            for pieces in zip(*(self.pieces(layer, group) for group in held), strict=True):
                views.tensors[pieces[0].parameter] = side_by_side(pieces, dense[pieces[0].parameter])
                views.put(pieces)
        return views


class Run:
    """Steps of one rank of a world that is not there."""

    def __init__(self, twin: Twin, max_elements: int = 10**9) -> None:
        self.exchange = Exchange(
            twin.buckets(max_elements),
            Communicator(Nobody(twin.num_ranks)),
            twin.nodes,
            device=META,
            dtype=torch.bfloat16,
        )
        self.views = twin.views()

    def step(self) -> Calls:
        """What a step calls, there and back."""
        averages = [
            [torch.empty(num_elements(shard), device=META) for _, shard in self.exchange.owned(bucket)]
            for bucket in self.exchange.buckets
        ]
        with Calls() as calls:
            for bucket, flats in zip(self.exchange.buckets, averages, strict=True):
                for steps in (
                    self.exchange.reduce(bucket, self.views, flats),
                    self.exchange.distribute(bucket, self.views),
                ):
                    assert all(step is None for step in steps)
        return calls


def steady(twin: Twin) -> Calls:
    """The calls of a step in which nothing is made for the first time."""
    run = Run(twin)
    for _ in range(2):
        run.step()
    return run.step()


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_calls_do_not_grow_with_units(num_ranks: int) -> None:
    """Four times as many units of the same holder sets in the same tensors: not a call more."""
    few, many = (steady(Twin(num_ranks, num_groups=groups)) for groups in (24, 96))
    assert Counter(few.names) == Counter(many.names)


def test_calls_of_a_bucket() -> None:
    """By what they are for, of one bucket of eight ranks on two nodes with all twelve holder sets."""
    twin = Twin(8)
    num_tensors, num_shards = 2 * twin.num_layers, NUM_SETS // 2
    calls = Counter(steady(twin).names)
    launches = {name: count for name, count in calls.items() if name.startswith("_foreach")}
    rounds = (PER_NODE - 1) + 1  # neighbors, and the other node, whose slices of a shard go to different elements
    assert launches.pop("_foreach_add_") <= rounds
    # Own gradients and packed ones, sums that leave and that stay, conversions; weights are packed and written twice.
    assert launches.pop("_foreach_copy_") <= 4 + rounds + 2 * 3
    assert launches == {"_foreach_div_": 1}
    views = sum(calls[name] for name in ("detach", "movedim", "reshape", "narrow", "split", "split_with_sizes"))
    # Two times the gradients, four times the weights, four calls for each tensor, and each time a buffer; sums of the
    # node are in one tensor, those of shards in one each; in a round what comes, as it comes and converted.
    assert views <= 6 * (4 * num_tensors + 1) + rounds * 2 + (PER_NODE - 1) + 2 * num_shards + (3 + num_shards)


@pytest.mark.parametrize("num_groups", [24, 96])
def test_views_follow_fragments_and_holder_sets_not_fragments_times_peers(num_groups: int) -> None:
    """More peers make more stretches, each of a holder set, and a stretch more is at most a fragment cut in two."""
    few, many = (steady(Twin(num_ranks, num_groups=num_groups)).num_views for num_ranks in (8, 32))
    num_fragments = 2 * 2 * num_groups // 2
    assert few <= 6 * num_fragments + 20 * NUM_SETS
    # Six nodes more: of each set a shard leaves to them, another comes and is converted and added.
    assert many - few <= 5 * 6 * NUM_SETS


def test_everything_is_made_once() -> None:
    """Routes once for each bucket and receivers, lists of what moves at the first use of each; then nothing."""
    twin = Twin(8, num_layers=6)
    located = []

    class Counted(PieceViews):
        def locate(self, piece: Piece) -> Location:
            located.append(piece)
            return super().locate(piece)

    with (
        mock.patch.object(exchange_module, "routes_back", wraps=exchange_module.routes_back) as routes,
        mock.patch.object(exchange_module, "BucketSums", wraps=exchange_module.BucketSums) as sums,
        mock.patch.object(Moves, "__init__", autospec=True, side_effect=Moves.__init__) as moves,
    ):
        run = Run(twin, max_elements=1000)
        run.views.__class__ = Counted
        assert len(run.exchange.buckets) > 2
        run.step()
        made = routes.call_count, sums.call_count, moves.call_count, len(located)
        assert made[:2] == (len(run.exchange.buckets), len(run.exchange.buckets))
        assert min(made) > 0
        for _ in range(2):
            run.step()
        assert (routes.call_count, sums.call_count, moves.call_count, len(located)) == made
        assert {(call.args[0].index, call.args[3]) for call in routes.call_args_list} == {
            (bucket.index, "holders") for bucket in run.exchange.buckets
        }
