"""Where each element comes from: this rank if it has it, else the one that sends it; nothing twice or too much."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.plan.shards import UNDIVIDED
from sdp_deepspeed.replan.share import Share, halves
from tests.helpers.replanned_boxes import KEY, SHAPE, catalog_of, layouts

EMPTY = catalog_of([])


@given(layouts(3), st.integers(0, 2))
def test_all_elements_come_from_where_they_are(layout: list[list[Box]], rank: int) -> None:
    """Rank 0, 1 and 2 send a part each; `rank` wants all, and has what it sends."""
    dense, place = torch.arange(24.0).view(SHAPE), torch.full(SHAPE, torch.nan)
    owners = [(owner, box) for owner, boxes in enumerate(layout) for box in boxes]
    catalog = catalog_of(owners)
    whole = Box.whole(SHAPE)
    own = [(box, dense[box.slices_in(whole)]) for box in layout[rank]]
    share = Share.of([(KEY, whole, place)], {KEY: [*own, *own]}, catalog)
    share.copy()
    missing = place.isnan()
    assert share.num_bytes(catalog) == 4 * int(missing.sum())
    assert rank not in share.requests
    for owner, requests in share.requests.items():
        for request, target in zip(requests, share.places[owner], strict=True):
            source = next(box for box in layout[owner] if box.offsets == request.chunk)
            assert source.overlap(request.box) == request.box
            assert bool(target.isnan().all()), "asked for twice"
            target.copy_(dense[request.box.slices_in(whole)])
    assert torch.equal(place, dense)


def test_what_nobody_has() -> None:
    half = Box((0, 0), (2, 6))
    catalog = catalog_of([(1, half)])
    assert list(catalog.gaps(UNDIVIDED)) == [KEY]
    with pytest.raises(RuntimeError, match=rf"no rank has '{KEY}' from \(2, 0\) on"):
        Share.of([(KEY, Box.whole(SHAPE), torch.empty(SHAPE))], {}, catalog)


def test_what_stays_is_not_touched() -> None:
    """A view of the same memory is not copied to itself: that would read and write all weights."""
    values = torch.arange(24.0).view(SHAPE)
    share = Share.of([(KEY, Box.whole(SHAPE), values)], {KEY: [(Box.whole(SHAPE), values.view(SHAPE))]}, EMPTY)
    version = values._version
    share.copy()
    assert values._version == version


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(0, 20))
def test_halves_are_all_of_a_box(sizes: list[int], limit: int) -> None:
    box = Box(tuple(3 for _ in sizes), tuple(sizes))
    shape = tuple(size + 3 for size in sizes)
    times = torch.zeros(shape, dtype=torch.int32)
    parts = list(halves(box, limit))
    for part in parts:
        assert part.num_elements <= max(1, limit)
        times[part.slices_in(Box.whole(shape))] += 1
    assert int(times.sum()) == box.num_elements
    assert bool((times[box.slices_in(Box.whole(shape))] == 1).all())
