"""The flat layout: every element travels exactly once, among exactly its holders, in bounded buckets."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.exchange.routes import routes_back
from sdp_deepspeed.layout.buckets import Bucket, build_buckets, build_segments, copies, default_bucket_elements
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.random_layouts import (
    NODES,
    Layout,
    indices,
    most_kept,
    placed,
    random_decoder,
    random_layout,
    without_whole,
)

layouts = st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 6), st.sampled_from(["forward", "backward"]))
backward_layouts = st.builds(
    placed,
    st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 8), st.just("backward")),
    st.sampled_from(sorted(NODES)),
)


def fill(counts: dict[str, torch.Tensor], fragment: Fragment, value: float) -> None:
    tensor = counts[fragment.piece.parameter]
    tensor.view(-1)[indices(fragment, tensor.shape)] += value


def zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {info.name: torch.zeros(info.shape) for info in layout.tensors}


@given(layouts)
def test_every_element_is_in_one_segment(layout: Layout) -> None:
    counts = zeros(layout)
    for segment in layout.segments:
        assert 0 < segment.num_elements <= layout.max_elements
        for fragment in segment.fragments:
            fill(counts, fragment, 1)
    assert all(bool((count == 1).all()) for count in counts.values())


@given(layouts)
def test_segments_have_the_holders_group_and_dtype_of_their_elements(layout: Layout) -> None:
    holders = {info.name: torch.full(info.shape, float(2**layout.size - 1)) for info in layout.tensors}
    for index, unit in enumerate(layout.plan.units):
        for piece in unit.pieces:
            piece.narrow(holders[piece.parameter]).fill_(sum(2**rank for rank in layout.plan.ranks_of(index)))
    found = zeros(layout)
    infos = {info.name: info for info in layout.tensors}
    for segment in layout.segments:
        for fragment in segment.fragments:
            info = infos[fragment.piece.parameter]
            assert (info.group, info.dtype) == (segment.group, segment.dtype)
            fill(found, fragment, sum(2**rank for rank in segment.holders))
    assert all(torch.equal(found[name], holders[name]) for name in found)


@given(layouts)
def test_buckets_keep_the_order_and_the_bound(layout: Layout) -> None:
    buckets = layout.buckets
    assert [segment for bucket in buckets for segment in bucket.segments] == layout.segments
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert len({segment.dtype for segment in bucket.segments}) == 1
        for rank in range(layout.size):
            held = sum(segment.num_elements for segment in bucket.segments if segment.held_by(rank))
            assert held <= layout.max_elements


def stretches(layout: Layout, buckets: list[Bucket], dtype: torch.dtype) -> list[list[int]]:
    """Per bucket of one dtype the positions of its elements in the order in which backward finishes them: last tensors
    first, each in the order in which it travels."""
    offset, positions = 0, {}
    for info in reversed(layout.tensors):
        positions[info.name] = offset
        offset += math.prod(info.shape) if info.dtype == dtype else 0
    found = []
    for bucket in buckets:
        own: list[int] = []
        for fragment in (f for s in bucket.segments if s.dtype == dtype for f in s.fragments):
            piece, shape = fragment.piece, layout.shape(fragment.piece.parameter)
            before = 0 if piece.dim is None else piece.start * math.prod(shape) // shape[piece.dim]
            start = positions[piece.parameter] + before
            own.extend(range(start + fragment.start, start + fragment.stop))
        found += [sorted(own)] if own else []
    return found


@given(layouts.map(without_whole))
def test_a_bucket_is_one_stretch_of_the_model(layout: Layout) -> None:
    """So that it is complete as soon as backward has passed that stretch, and buckets complete one after the other."""
    for dtype in (torch.float32, torch.bfloat16):
        found = stretches(layout, layout.buckets, dtype)
        assert [position for stretch in found for position in stretch] == list(range(sum(map(len, found))))


@given(layouts.map(without_whole), st.sampled_from((1, 3, 10)))
def test_buckets_of_several_windows_complete_in_order(layout: Layout, times: int) -> None:
    """Where one half of the exchange has smaller buckets, a window may lie in two buckets of the other, in no more."""
    all_receive_weights, limit = layout.plan.regime == "backward", times * layout.max_elements
    buckets = build_buckets(layout.segments, layout.nodes, max_elements=limit, all_receive_weights=all_receive_weights)
    for dtype in (torch.float32, torch.bfloat16):
        found = stretches(layout, buckets, dtype)
        assert sorted(position for stretch in found for position in stretch) == list(range(sum(map(len, found))))
        assert all(one[0] < other[0] for one, other in itertools.pairwise(found))
        assert all(one[-1] < other[0] for one, other in zip(found, found[2:], strict=False))


def test_backward_order_and_one_segment_per_holder_set() -> None:
    """Units of equal holders travel together, last tensors first; what is in no unit goes to everyone."""
    tensors = [TensorInfo(name, (4,), torch.float32, 0) for name in ("in", "a", "b", "c", "out")]
    units = tuple(Unit(name, (Piece(name, None, 0, 4),)) for name in ("a", "b", "c"))
    plan = Plan("forward", "block", 3, 2, 0, units, ((0, 1), (1, 2), (0, 1)), (0, 1, 2))
    segments = build_segments(tensors, plan, max_elements=100)
    names = [[fragment.piece.parameter for fragment in segment.fragments] for segment in segments]
    assert names == [["out", "in"], ["c", "a"], ["b"]]
    assert [segment.holders for segment in segments] == [(0, 1, 2), (0, 1), (1, 2)]
    assert len(build_buckets(segments, Nodes.one(3), max_elements=100)) == 1


def test_buckets_count_the_fullest_rank_not_the_sum() -> None:
    """Segments of disjoint holders fit one bucket, since no rank packs both."""
    piece = Piece("a", None, 0, 8)
    holders = enumerate(((0, 1), (2, 3), (1, 2)))
    apart = [Segment(0, torch.float32, ranks, (Fragment(piece, 0, 8),), window=index) for index, ranks in holders]
    assert [len(bucket.segments) for bucket in build_buckets(apart, Nodes.one(4), max_elements=8)] == [2, 1]


def test_a_sliced_tensor_that_everybody_holds_is_one_fragment() -> None:
    units, everyone = (Unit("u", (Piece("w", 1, 2, 3),)), Unit("v", (Piece("w", 1, 7, 1),))), (0, 1)
    plan = Plan("forward", "block", 2, 2, 0, units, (everyone, everyone), everyone)
    segments = build_segments([TensorInfo("w", (2, 9), torch.float32, 0)], plan, max_elements=100)
    assert [segment.fragments for segment in segments] == [(Fragment(Piece("w", None, 0, 18), 0, 18),)]


@given(layouts)
def test_a_whole_tensor_has_one_owner_who_gets_its_parts_one_after_the_other(layout: Layout) -> None:
    """Side by side in the owner's flat gradient, whatever bucket each part travels in."""
    whole = {info.name for info in layout.tensors if info.is_whole}
    owners: defaultdict[str, set[int | None]] = defaultdict(set)
    owned: defaultdict[tuple[int, int], list[Fragment]] = defaultdict(list)
    for segment in layout.segments:
        names = {fragment.piece.parameter for fragment in segment.fragments}
        assert (segment.sole_owner is not None) == bool(names & whole) == (names <= whole)
        for name in names & whole:
            owners[name].add(segment.sole_owner)
        if segment.sole_owner is not None:
            owned[segment.sole_owner, segment.group] += segment.fragments
    assert all(len(ranks) == 1 for ranks in owners.values())
    for fragments in owned.values():
        stretches = [list(parts) for _, parts in itertools.groupby(fragments, key=lambda fragment: fragment.piece)]
        assert len(stretches) == len({fragment.piece for fragment in fragments})
        for parts in stretches:
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]


def test_owners_send_at_the_same_time() -> None:
    """A bucket that is far too small for a matrix has a part of each owner's: none sends alone while others wait."""
    tensors = [TensorInfo(f"w{index}", (30, 30), torch.float32, 0, is_whole=True) for index in range(8)]
    plan = Plan("forward", "block", 4, 4, 0, (Unit("u", ()),), ((0, 1, 2, 3),), (0, 1, 2, 3))
    segments = build_segments(tensors, plan, max_elements=400)
    buckets = build_buckets(segments, Nodes.one(4), max_elements=400)
    assert len(buckets) > len(tensors)
    assert all({segment.sole_owner for segment in bucket.segments} == {0, 1, 2, 3} for bucket in buckets)
    assert max(bucket_load(bucket, 4) for bucket in buckets) <= 400


@pytest.mark.slow
def test_what_waits_is_bounded_on_many_ranks() -> None:
    """Beside it there may be the tensor that was one too many, and what is stepped element by element."""
    (tensors, plan), nodes = random_decoder(64, 32, 32, seed=0), Nodes.of([rank // 8 for rank in range(64)])
    limit, found = sum(math.prod(info.shape) for info in tensors) // 2 // 16, []
    for max_waiting in (4 * limit, math.inf):
        segments = build_segments(tensors, plan, max_elements=limit, nodes=nodes, max_waiting=max_waiting)
        buckets = build_buckets(segments, nodes, max_elements=limit)
        found.append((most_kept(tensors, plan, buckets), len(buckets)))
    (kept, num_buckets), (kept_without, num_without) = found
    largest = max(math.prod(info.shape) for info in tensors if info.is_whole)
    rest = sum(math.prod(info.shape) for info in tensors if not info.is_whole)
    assert kept <= 4 * limit + largest + rest < kept_without
    assert num_buckets <= 1.2 * num_without, "else few owners send at the same time"


def bucket_load(bucket: Bucket, size: int) -> int:
    """What the rank that packs most packs of it."""
    routes = [routes_back(bucket, rank, Nodes.one(size), "holders")[1] for rank in range(size)]
    return max(sum(half.splits) for route in routes for half in (route.sent, route.received))


def packed(layout: Layout) -> list[tuple[int, int]]:
    """Per bucket and rank what it packs and unpacks at most in one collective of the backward regime, and in how many
    segments."""
    amounts = []
    for bucket in layout.buckets:
        for rank in range(layout.size):
            routes = [r for receivers in ("holders", "all") for r in routes_back(bucket, rank, layout.nodes, receivers)]
            amounts.append(
                (max(sum(half.splits) for r in routes for half in (r.sent, r.received)), len(bucket.segments))
            )
    return amounts


@given(backward_layouts)
@pytest.mark.slow
def test_buffers_are_bounded_in_the_backward_regime(layout: Layout) -> None:
    """A shard is rounded up to whole elements, and goes to all other ranks; a limit below their number cannot hold."""
    limit, others = max(layout.max_elements, layout.size), layout.size - 1
    for amount, num_segments in packed(replace(layout, max_elements=limit)):
        assert amount <= limit + num_segments * others


@pytest.mark.parametrize("num_holders", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [12, 36, 60, 10_000])
def test_the_bound_is_exact_where_shards_divide(num_holders: int, limit: int) -> None:
    """Four ranks, units of 60 elements in their two tensors, shared ones in between; 12 divide among 1, 2, 3 and 4."""
    size = 4
    tensors, units = [], []
    for index in range(2 * size):
        pieces = tuple(Piece(f"{name}{index}", None, 0, 60) for name in "ab")
        tensors += [TensorInfo(piece.parameter, (60,), torch.float32, 0) for piece in pieces]
        tensors.append(TensorInfo(f"shared{index}", (12,), torch.float32, 0))
        units.append(Unit(f"u{index}", pieces))
    holders = [tuple(sorted((index + i) % size for i in range(num_holders))) for index in range(2 * size)]
    plan = Plan("backward", "block", size, num_holders, 0, tuple(units), tuple(holders), tuple(range(size)))
    layout = Layout(size, tuple(tensors), plan, limit)
    copies = max(1, -(-(size - 1) // num_holders))
    amounts = [amount for amount, _ in packed(layout)]
    assert 0 < max(amounts) <= limit
    assert max(amounts) >= min(limit, 120) // (2 * copies), "buckets far below the limit would only cost collectives"


def test_buckets_of_no_given_size() -> None:
    """Half a million elements to each of the most holders, or a 16th of what the rank holds that holds most."""
    units = tuple(Unit(name, (Piece(name, None, 0, 10**6),)) for name in "abc")
    pairs, some_whole = ((0, 1), (1, 2), (2, 3)), ((0, 1, 2, 3), (0, 1), (2, 3))
    plan = Plan("forward", "block", 4, 2, 0, units, pairs, (0, 1, 2, 3))
    replicated = replace(plan, subnetwork_of_rank=(0, 0, 1, 1, 2, 2, 3, 3))
    different = replace(plan, num_holders=None, holders=some_whole)
    for width, used, expected in (
        (4, plan, 10**6),
        (4, replicated, 2 * 10**6),
        (4, different, 2 * 10**6),
        (10**8, plan, (10**8 + 2 * 10**6) // 16),
    ):
        tensors = [TensorInfo(unit.name, (10**6,), torch.float32, 0) for unit in units]
        tensors.append(TensorInfo("shared", (width,), torch.float32, 0))
        assert default_bucket_elements(tensors, used) == expected


@pytest.mark.parametrize(
    ("labels", "holders", "expected"),
    [
        ("aaaa", (0, 1), {"holders": 1, "others": 1, "all": 1.5}),
        ("aaaa", (3,), {"holders": 1, "others": 3, "all": 3}),
        ("aabb", (0,), {"holders": 1, "others": 1, "all": 1}),
        ("abcd", (0,), {"holders": 1, "others": 3, "all": 3}),
        ("abcdd", (0, 4), {"holders": 1, "others": 1, "all": 1.5}),
        ("aaaabbbb", (0, 1, 4), {"holders": 1, "others": 3, "all": 3}),  # rank 4 passes on all to three neighbors
    ],
)
def test_copies_by_hand(labels: str, holders: tuple[int, ...], expected: dict[str, float]) -> None:
    receivers: tuple[Receivers, ...] = ("holders", "others", "all")
    assert {which: max(copies(Nodes.of(labels), holders, which).values()) for which in receivers} == expected


@given(st.integers(0, 100_000), st.sampled_from(sorted(NODES)), st.sampled_from(["holders", "others", "all"]))
@pytest.mark.slow
def test_nobody_packs_more_than_it_is_counted_with(seed: int, nodes: str, receivers: Receivers) -> None:
    """By the routes themselves, but for shards that are rounded up to whole elements."""
    layout = placed(random_layout(seed, 8), nodes)
    for bucket in layout.buckets:
        for rank in range(8):
            load: defaultdict[str, float] = defaultdict(float)
            for segment in bucket.segments:
                for (peer, which), amount in copies(
                    layout.nodes, segment.holders, receivers, segment.sole_owner
                ).items():
                    load[which] += segment.num_elements * amount * (peer == rank)
            between, inside = routes_back(bucket, rank, layout.nodes, receivers)
            rounding = 8 * len(bucket.segments)
            assert sum(inside.sent.splits) <= load["sent inside"] + rounding
            assert sum(between.sent.splits) <= load["sent between"] + rounding
            assert sum(inside.received.splits) <= load["received inside"] + rounding
            assert sum(between.received.splits) <= load["received between"] + rounding
