"""A tensor cut into boxes, each of which a rank sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.replan.catalog import Catalog, Owners

KEY, SHAPE = "weight/w", (4, 6)


@st.composite
def layouts(draw: st.DrawFn, size: int) -> list[list[Box]]:
    """Of each rank its boxes, which together are the tensor of SHAPE."""
    result: list[list[Box]] = [[] for _ in range(size)]
    for box in _cut(draw, Box.whole(SHAPE), draw(st.integers(0, 5))):
        result[draw(st.integers(0, size - 1))].append(box)
    return result


def catalog_of(owners: Sequence[tuple[int, Box]]) -> Catalog:
    """Of the tensor of SHAPE, whose boxes these ranks have."""
    boxes = np.array([(*box.offsets, *box.sizes) for _, box in owners], np.int64).reshape(len(owners), 2 * len(SHAPE))
    ranks = np.array([rank for rank, _ in owners], np.int64)
    return Catalog({KEY: SHAPE}, {KEY: torch.float32}, {KEY: Owners(ranks, boxes)})


def _cut(draw: st.DrawFn, box: Box, times: int) -> list[Box]:
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not times or not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    size = draw(st.integers(1, box.sizes[dim] - 1))
    first = Box(box.offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
    return [part for half in (first, *box.without(first)) for part in _cut(draw, half, times - 1)]
