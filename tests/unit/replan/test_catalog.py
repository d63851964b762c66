"""What there is before a re-plan: what a rank may take from itself, and what all ranks send."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.plan.shards import UNDIVIDED, Division, Shards
from sdp_deepspeed.replan.catalog import Catalog, OwnState
from tests.helpers import replanned_boxes
from tests.helpers.gatherers import outcomes_of
from tests.helpers.replanned_boxes import KEY, catalog_of, layouts
from tests.helpers.trained_states import SHAPE, one_rank


def test_own_state_is_views_of_what_lives() -> None:
    trained = one_rank(dtype=torch.bfloat16)
    trained.step()
    chunks = trained.rank_chunks()
    own = OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=False)
    kinds = {key.partition("/")[0] for key in own.owned}
    assert kinds == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for key in own.owned:
        assert key in own.local
    with torch.no_grad():
        trained.module.get_parameter("shared").fill_(3)
    (box, values), *_ = own.local["weight/shared"]
    assert box == Box.whole(SHAPE)
    assert bool((values == 3).all()), "a copy would take as much memory again"


def test_buffers_are_one_s_own_where_the_plan_stays() -> None:
    """Else the writer's, which this rank is, once; with its own it has them among what it stores, too."""
    trained = one_rank()
    chunks = trained.rank_chunks()
    number = [
        len(OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=own).local["weight/num_seen"])
        for own in (False, True)
    ]
    assert number == [1, 2]


def test_the_catalog_of_all_ranks() -> None:
    trained = one_rank()
    trained.step()
    chunks = trained.rank_chunks()
    own = OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=False)
    catalog = Catalog.gather(own.owned, OneRank())
    assert not list(catalog.gaps(UNDIVIDED))
    stored: dict[str, Any] = dict(catalog.metadata().state_dict_metadata)
    assert stored.keys() == own.owned.keys()
    assert tuple(stored["exp_avg/cut"].size) == SHAPE
    assert stored["weight/num_seen"].properties.dtype == torch.float32


@given(layouts(3), layouts(1))
def test_who_has_some_of_a_box(layout: list[list[Box]], wanted: list[list[Box]]) -> None:
    owners = [(rank, box) for rank, boxes in enumerate(layout) for box in boxes]
    catalog = catalog_of(owners)
    assert not list(catalog.gaps(UNDIVIDED))
    for box in wanted[0]:
        found = list(catalog.owners[KEY].overlapping(box))
        assert found == [(rank, other) for rank, other in owners if box.overlap(other) is not None]


def test_too_much_and_too_little_are_found() -> None:
    whole, row = Box.whole(replanned_boxes.SHAPE), Box((0, 0), (1, 6))
    assert [list(catalog_of(owners).gaps(UNDIVIDED)) for owners in ([(0, whole), (1, row)], [(1, row)])] == [[KEY]] * 2


def test_of_a_divided_tensor_the_ranks_have_a_shard() -> None:
    shard = Box((0, 4), (4, 2))
    of_rank = [Shards(index, 2, {"w": Division(replanned_boxes.SHAPE, 1, (4, 2))}) for index in range(2)]
    catalog = catalog_of([(0, shard)])
    assert [list(catalog.gaps(shards)) for shards in of_rank] == [[KEY], []]


def test_tensors_without_dims_and_without_elements() -> None:
    shapes: dict[str, tuple[int, ...]] = {"number": (), "nothing": (0, 3), "none": (0,), "line": (8,), "plane": (8, 4)}
    boxes = {name: [] if 0 in shape else [Box.whole(shape)] for name, shape in shapes.items()}

    def work(rank: int, objects: Any) -> Catalog:
        owned = {name: Chunks(shape, torch.float32) for name, shape in shapes.items()}
        for name, of_name in boxes.items() if rank == 1 else ():
            for box in of_name:
                owned[name].add(box, torch.zeros(box.sizes))
        return Catalog.gather(owned, objects)

    for catalog in outcomes_of(2, work):
        assert catalog.shapes == shapes
        assert not list(catalog.gaps(UNDIVIDED))
        for name, of_name in boxes.items():
            assert list(catalog.owners[name].overlapping(Box.whole(shapes[name]))) == [(1, box) for box in of_name]


def test_what_is_cut_alike_is_said_once() -> None:
    """Weights, masters and moments: what ranks gather grows with the boxes of one of them."""
    sizes = []
    for kinds in (["weight"], ["weight", "master", "exp_avg", "exp_avg_sq"]):
        owned = {f"{kind}/w": Chunks((4000, 4), torch.float32) for kind in kinds}
        for chunks in owned.values():
            for row in range(0, 4000, 2):
                chunks.add(Box((row, 0), (2, 4)), torch.zeros(2, 4))
        gathered: list[object] = []

        def gather(value: object, gathered: list[object] = gathered) -> list[object]:
            gathered.append(value)
            return [value]

        ranks: Any = SimpleNamespace(gather_objects=gather)
        catalog = Catalog.gather(owned, ranks)
        assert len({id(owners) for owners in catalog.owners.values()}) == 1
        sizes.append(len(pickle.dumps(gathered)))
    assert sizes[0] < sizes[1] < 1.02 * sizes[0]
    assert sizes[0] < 2000 * 4 * 2 + 1000, "numbers of two bytes, no objects"
