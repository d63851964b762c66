"""Where shards lie in the dense model: of whole tensors, and of intervals along either dim."""

from __future__ import annotations

import random

import pytest
import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.fsdp.local_chunks import LocalChunks, LocalTensor, Replicated
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.shard_regions import parts_of_shard
from sdp_deepspeed.plan.tensors import TensorInfo
from tests.helpers.held_tensors import assembled, chunks_of, cut, fill_from, shard_of, whole


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_a_shard_of_rows() -> None:
    held = whole("w", 1, 4, 6)
    assert list(parts_of_shard(held, 4, (7, 3))) == [(Box((3, 0), (3, 3)), Box((0, 0), (3, 3)))]
    assert list(parts_of_shard(held, 6, (7, 3))) == [(Box((6, 0), (1, 3)), Box((0, 0), (1, 3)))]


def test_more_holders_than_rows() -> None:
    held = whole("w", 0, 1, 2)
    assert [len(list(parts_of_shard(held, rank, (2, 3)))) for rank in range(3)] == [1, 1, 0]
    assert list(parts_of_shard(whole("w", 0), 0, (2, 0))) == []


def test_rows_that_lie_in_two_intervals() -> None:
    """S has rows 5, 6, 7, 0, 1 of the dense tensor; the first of two holders stores three of them."""
    held = HeldTensor("w.0", "w", 0, ((5, 3), (0, 2)), (0, 1))
    assert list(parts_of_shard(held, 0, (9, 2))) == [(Box((5, 0), (3, 2)), Box((0, 0), (3, 2)))]
    assert list(parts_of_shard(held, 1, (9, 2))) == [(Box((0, 0), (2, 2)), Box((0, 0), (2, 2)))]
    held = HeldTensor("w.0", "w", 0, ((5, 3), (0, 2)), (0, 1, 2))
    assert list(parts_of_shard(held, 1, (9, 2))) == [
        (Box((7, 0), (1, 2)), Box((0, 0), (1, 2))),
        (Box((0, 0), (1, 2)), Box((1, 0), (1, 2))),
    ]


def test_columns_in_two_intervals() -> None:
    held = HeldTensor("w.0", "w", 1, ((4, 1), (0, 2)), (0, 1))
    assert list(parts_of_shard(held, 1, (3, 6))) == [
        (Box((2, 4), (1, 1)), Box((0, 0), (1, 1))),
        (Box((2, 0), (1, 2)), Box((0, 1), (1, 2))),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_intervals_of_all_kinds(seed: int) -> None:
    """Each element of the dense tensor is where the parts say, once, however it was dealt to how many holders."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
    dim, dense = draw.randrange(len(shape)), numbered(*shape)
    indices = list(range(shape[dim]))
    if draw.random() < 0.5:
        draw.shuffle(indices)
    layout: list[HeldTensor] = []
    while indices:
        taken = [indices.pop() for _ in range(min(len(indices), draw.randint(1, 4)))]
        holders = tuple(sorted(draw.sample(range(5), draw.randint(1, 5))))
        layout.append(HeldTensor(f"w.{len(layout)}", "w", dim, tuple((index, 1) for index in taken), holders))
    seen = torch.zeros(shape)
    for held in layout:
        for rank in held.holders:
            shard = shard_of(held, rank, dense)
            covered = torch.zeros(shard.shape)
            for box, inside in parts_of_shard(held, rank, shape):
                here, there = inside.slices_in(Box.whole(shard.shape)), box.slices_in(Box.whole(shape))
                assert torch.equal(shard[here], dense[there])
                covered[here] += 1
                seen[there] += 1
            assert bool((covered == 1).all())
    assert bool((seen == 1).all())


DENSE = {"whole": numbered(5, 3), "rows": numbered(8, 3), "columns": numbered(3, 8), "bias": numbered(8)}
LAYOUT = [
    whole("whole", 0, 1, 2, 3),
    *cut("rows", 0, [(((0, 1), (4, 1), (7, 1)), (0, 1)), (((1, 3), (5, 2)), (1, 2, 3))]),
    *cut("columns", 1, [(((0, 1), (4, 1), (7, 1)), (0, 1)), (((1, 3), (5, 2)), (1, 2, 3))]),
    *cut("bias", 0, [(((0, 1), (4, 1), (7, 1)), (0, 1)), (((1, 3), (5, 2)), (1, 2, 3))]),
]
OTHER = [whole("whole", 2), whole("rows", 0, 1), whole("columns", 1, 2, 3), *cut("bias", 0, [(((0, 8),), (0, 3))])]


def test_what_is_written_by_one_layout_is_read_by_another() -> None:
    dense = {f"weight/{name}": values for name, values in DENSE.items()}
    written = assembled([chunks_of(rank, LAYOUT, DENSE).written_weights(exclude_frozen=False) for rank in range(4)])
    assert written.keys() == dense.keys()
    assert all(torch.equal(written[key], dense[key]) for key in dense)
    empty = {name: torch.full_like(values, -1.0) for name, values in DENSE.items()}
    readers = [chunks_of(rank, OTHER, empty) for rank in range(4)]
    for reader in readers:
        fill_from(written, reader.written_weights(exclude_frozen=False))
    again = assembled([reader.written_weights(exclude_frozen=False) for reader in readers])
    assert all(torch.equal(again[key], dense[key]) for key in dense)


def test_what_is_stored_is_live() -> None:
    chunks = chunks_of(1, LAYOUT, DENSE)
    assert {name for name, _, _ in chunks.stored_weights()} == DENSE.keys()
    for name, box, values in chunks.stored_weights():
        assert torch.equal(values, DENSE[name][box.slices_in(Box.whole(DENSE[name].shape))])
        values.fill_(7.0)
    assert all(bool((local.tensor == 7.0).all()) for local in chunks.local_tensors)


def test_frozen_parameters_are_left_out() -> None:
    chunks = chunks_of(0, LAYOUT, DENSE, frozen=["whole", "bias"])
    assert chunks.written_weights(exclude_frozen=True).keys() == {"weight/rows", "weight/columns"}
    assert len(chunks.written_weights(exclude_frozen=False)) == 4


def test_what_is_replicated_is_written_by_one_and_its_buffers_are_each_ranks_own() -> None:
    infos = [TensorInfo("mean", (2,), torch.float32, kind="buffer"), TensorInfo("plain", (2,), torch.float32)]

    def rank(writes: bool) -> LocalChunks:
        part = ((Box.whole((2,)), Box.whole((2,))),)
        mean, plain = torch.tensor([1.0, 2.0]), torch.nn.Parameter(torch.zeros(2))
        tensors = [LocalTensor("mean", mean, part), LocalTensor("plain", plain, part)]
        return LocalChunks(infos, [], [Replicated(tensor, writes) for tensor in tensors])

    writer, other = rank(True), rank(False)
    assert writer.written_weights(exclude_frozen=False).keys() == {"weight/mean", "weight/plain"}
    assert other.written_weights(exclude_frozen=False) == {}
    assert len(list(other.stored_weights())) == 2
    buffers = other.own_buffers()
    assert list(buffers) == ["mean"]
    writer.restore_buffers({"mean": torch.tensor([3.0, 4.0]), "of another host": torch.zeros(1)})
    writer.restore_buffers({})
    assert torch.equal(writer.own_buffers()["mean"], torch.tensor([3.0, 4.0]))
