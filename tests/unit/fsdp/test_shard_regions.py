"""Regions of shards cover the dense tensor once, and lie in shards as FSDP2 cuts them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.shard_regions import regions_of


@st.composite
def held_tensors(draw: st.DrawFn) -> tuple[HeldTensor, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    holders = tuple(sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=5))))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    intervals: list[tuple[int, int]] = []
    if dim is not None:
        edges = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=6)))
        intervals = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return HeldTensor("name", "dense", dim, tuple(intervals), holders), shape


@given(held_tensors())
def test_regions_are_where_chunks_are(given_tensor: tuple[HeldTensor, tuple[int, ...]]) -> None:
    held, shape = given_tensor
    dense = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    whole = dense
    if held.dim is not None:
        whole = torch.cat([dense.narrow(held.dim, a, n) for a, n in held.intervals], held.dim)
    chunks = [*torch.chunk(whole, len(held.holders)), *[whole[:0]] * len(held.holders)]
    found, pieces = torch.zeros_like(dense), set()
    for region in regions_of(held, shape):
        value = region.in_shard(chunks[held.holders.index(region.owner)])
        assert value.numel() == region.num_elements == region.piece.length > 0
        assert region.piece not in pieces
        pieces.add(region.piece)
        target = region.in_dense(found)
        assert not target.any()
        target.copy_(value)
    expected = torch.zeros_like(dense)
    for start, length in held.intervals or ((0, shape[0]),):
        expected.narrow(held.dim or 0, start, length).copy_(dense.narrow(held.dim or 0, start, length))
    assert torch.equal(found, expected)
