"""Shards in dense coordinates are those of `torch.chunk`."""

from __future__ import annotations

import pytest
import torch

from sdp_deepspeed.fsdp.pieces import HeldTensor, elements_of, rows_of, shards


@pytest.mark.parametrize("num_holders", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(1,), (6,), (7, 3), (8, 2, 5), (3, 4)])
def test_shards_are_those_of_chunk(num_holders: int, shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = [*torch.chunk(whole, num_holders), *[whole[:0]] * num_holders][:num_holders]
    for position, chunk in enumerate(chunks):
        start, stop = rows_of(position, num_holders, shape[0])
        assert torch.equal(whole[start:stop], chunk)
        first, last = elements_of(position, num_holders, shape)
        assert torch.equal(whole.reshape(-1)[first:last], chunk.reshape(-1))
    found = [stop - start for _, start, stop in shards(range(num_holders), shape)]
    assert found == [chunk.numel() for chunk in chunks if chunk.numel()]


def test_a_part_knows_its_shape() -> None:
    part = HeldTensor("mlp.up.weight", "mlp.up.weight", 1, ((0, 2), (6, 3)), (0, 2))
    assert (part.shape((4, 9)), part.is_whole) == ((4, 5), False)
    whole = HeldTensor("norm.weight", "norm.weight", None, (), (0, 1))
    assert (whole.shape((4,)), whole.is_whole) == ((4,), True)
