"""A snapshot on its way to host memory, also from a device, with copies as late as they may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict
from sdp_deepspeed.checkpoint.state.host_copy import HostCopy, HostMemory, pieces_of
from tests.helpers.late_copies import LateCopies


def chunks_of(**tensors: torch.Tensor) -> StateDict:
    """Each row of a matrix is a chunk; of a matrix that was turned, each column."""
    result: StateDict = {}
    for name, tensor in tensors.items():
        result[name] = Chunks(tensor.shape, tensor.dtype)
        for index, row in enumerate(tensor.split(1)):
            result[name].add(Box((index, 0), tuple(row.shape)), row)
    return result


def live_tensors() -> dict[str, torch.Tensor]:
    """Small elements first, so that they are not copied in their order."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 5, generator=generator)
    return {"small": matrix.to(torch.bfloat16), "large": matrix.double(), "turned": matrix.clone().T}


def all_of(chunks: StateDict) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    for name, of_tensor in chunks.items():
        for box in of_tensor.boxes():
            yield name, box.offsets, of_tensor.at(box.offsets)


def test_a_copy_stays_as_it_was() -> None:
    tensors = live_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    copy = HostCopy(chunks_of(**tensors), HostMemory())
    copy.run()
    for tensor in tensors.values():
        tensor.fill_(9)
    assert list(copy.chunks) == list(tensors)
    for name, (row, _), values in all_of(copy.chunks):
        assert torch.equal(values, expected[name][row : row + 1])
        assert values.is_contiguous()


def test_memory_is_kept_and_grows() -> None:
    memory = HostMemory()
    first = memory.take(24).data_ptr()
    assert memory.take(24).data_ptr() == memory.take(16).data_ptr() == first
    assert [memory.take(size).numel() for size in (16, 3000, 24, 0)] == [16, 3000, 24, 0]
    grown = memory.take(3000).data_ptr()
    assert memory.take(24).data_ptr() == grown


def test_one_thread_reads_while_another_copies() -> None:
    copy, found = HostCopy(chunks_of(w=torch.ones(2, 3)), HostMemory()), list[torch.Tensor]()
    reader = threading.Thread(target=lambda: found.append(copy.chunks["w"].at((1, 0)).clone()))
    reader.start()
    reader.join(0.05)
    assert not found, "it was not there yet"
    copy.run()
    reader.join(60)
    assert found[0].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
def test_who_waits_learns_that_nothing_comes(error: BaseException) -> None:
    copy = HostCopy(chunks_of(w=torch.ones(2, 3)), HostMemory())
    with mock.patch.object(HostCopy, "_copy", side_effect=error):
        if isinstance(error, Exception):
            copy.run()
        else:
            with pytest.raises(KeyboardInterrupt):
                copy.run()
    with pytest.raises(RuntimeError, match=r"not be copied to host memory: (MemoryE|KeyboardI)"):
        copy.chunks["w"].at((0, 0))


@pytest.mark.parametrize("slab_bytes", [8, 48, 100, 1000])
def test_from_a_device_through_two_slabs(slab_bytes: int) -> None:
    tensors, copies = live_tensors(), LateCopies()
    copy = HostCopy(chunks_of(**tensors), HostMemory())
    copy._copy_from(copy._parts, copies, slab_bytes)
    for name, (row, _), values in all_of(copy.chunks):
        assert torch.equal(values, tensors[name][row : row + 1])
    assert copies.num_bytes == [slab_bytes] * 2


def test_what_is_on_a_device_comes_last() -> None:
    """So that its copies lie side by side; and nothing overlaps."""
    tensors = {"far": torch.ones(3, 5, device="meta", dtype=torch.float64), "near": torch.ones(3, 1).bfloat16()}
    with mock.patch.object(HostCopy, "_copy_from") as copied:
        copy = HostCopy(chunks_of(**tensors), HostMemory())
        copy.run()
    (parts, copies, _), _ = copied.call_args
    assert (copies.device, len(parts)) == (torch.device("meta"), 3)
    assert [(part.start, part.end) for part in copy._parts] == [
        *((0, 2), (2, 4), (4, 6)),
        *((8, 48), (48, 88), (88, 128)),
    ]
    assert copy.chunks["near"].at((2, 0)).tolist() == [[1]]


@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    turned=st.booleans(),
    max_bytes=st.integers(4, 200),
)
def test_pieces_are_all_in_their_order(shape: list[int], turned: bool, max_bytes: int) -> None:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    values = values.permute(list(reversed(range(values.dim())))) if turned else values
    pieces = list(pieces_of(values, max_bytes))
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), values.reshape(-1))
    assert all(piece.nbytes <= max_bytes for piece in pieces)
    assert all(piece.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for piece in pieces)
