"""Memory of collectives: bounded, at the same addresses in each step, and never lent before its last use is over."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from tests.helpers.stream_order import pretended_streams, stream_order

from benchmarks.common.measured_step import watched_host_memory
from sdp_deepspeed.exchange.buffers import Buffers
from sdp_deepspeed.exchange.streams import GpuStreams

CPU = torch.device("cpu")
SIZES = (10, 30, 20, 40, 5, 40, 1)  # elements


def lend_by_turns(buffers: Buffers, num_lent: int = 2) -> list[int]:
    """Addresses in a step in which so many are lent at a time."""
    lent, addresses = list[torch.Tensor](), list[int]()
    for size in SIZES:
        if len(lent) == num_lent:
            buffers.give(lent.pop(0))
        lent.append(buffers.take(size, torch.float32))
        assert lent[-1].shape == (size,)
        addresses.append(lent[-1].data_ptr())
        lent[-1].fill_(size)
        assert all(bool((tensor == tensor.numel()).all()) for tensor in lent), "two have the same memory"
    for tensor in lent:
        buffers.give(tensor)
    return addresses


@pytest.mark.parametrize("num_lent", [1, 2, 3])
def test_addresses_are_stable_and_memory_is_bounded(num_lent: int) -> None:
    buffers = Buffers(CPU)
    *_, before, last = (lend_by_turns(buffers, num_lent) for _ in range(4))
    assert before == last
    assert len(set(last)) == num_lent
    assert buffers.num_bytes <= num_lent * max(SIZES) * 4


def test_tensors_are_the_same_objects() -> None:
    """So that views of them can be kept; of another dtype they are others, of the same memory."""
    buffers = Buffers(CPU)
    first = buffers.take(8, torch.float32)
    buffers.give(first)
    other = buffers.take(16, torch.bfloat16)
    assert other.data_ptr() == first.data_ptr()
    assert other.dtype == torch.bfloat16
    buffers.give(other)
    half = buffers.take(8, torch.bfloat16)
    assert (half.dtype, half.data_ptr()) == (torch.bfloat16, first.data_ptr())
    buffers.give(half)
    assert buffers.take(8, torch.float32) is first


def test_what_is_large_enough_is_found_in_any_order() -> None:
    """None grows because another one of the same step came first."""
    buffers = Buffers(CPU)
    for sizes in ((10, 100), (100, 10), (10, 100), (100, 10)):
        for tensor in [buffers.take(size, torch.float32) for size in sizes]:
            buffers.give(tensor)
        assert buffers.num_bytes == 4 * 110


def test_a_block_that_grows_is_not_there_twice() -> None:
    """Not even if views of it are kept, as for a bucket that comes again in the next step."""
    views = []
    with watched_host_memory() as found:
        buffers = Buffers(CPU)
        for size in (100_000, 200_000, 300_000):
            lent = buffers.take(size, torch.float32)
            views.append(lent[1:])
            buffers.give(lent)
            del lent
    assert found.peak == found.at_end == 4 * 300_000


def test_nothing_takes_no_memory() -> None:
    buffers = Buffers(CPU)
    one, other = buffers.take(0, torch.float32), buffers.take(0, torch.float32)
    buffers.give(one)
    buffers.give(other)
    assert buffers.num_bytes == 0


def test_what_is_not_kept_is_gone() -> None:
    """Also what an error kept from being given back."""
    buffers = Buffers(CPU, is_kept=False)
    lend_by_turns(buffers)
    with watched_host_memory() as found:
        lost = buffers.take(100_000, torch.float32)
        del lost
    assert found.peak == 4 * 100_000
    assert found.at_end == buffers.num_bytes == 0


def lent_on_two_streams(size: int) -> None:
    """Lent on the caller's stream, used and given back on another, and lent there again."""
    streams = GpuStreams(CPU, overlaps=True)
    buffers = Buffers(CPU, streams)
    first = buffers.take(8, torch.float32)
    first.zero_()
    with streams.beside():
        first.add_(1)
        buffers.give(first)
        del first
        second = buffers.take(size, torch.float32)
        second.zero_()
        buffers.give(second)
    torch.zeros(8, dtype=torch.float32)  # on the caller's stream: may be memory that grew too small
    third = buffers.take(8, torch.float32)
    third.zero_()


def without_wait(streams: GpuStreams, mark: object) -> None:
    """What `wait` is instead."""


def without_record(streams: GpuStreams, memory: torch.Tensor) -> None:
    """What `record` is instead."""


@pytest.mark.parametrize(
    ("size", "method", "instead", "what"),
    [(8, "wait", without_wait, "without a wait"), (9, "record", without_record, "may get memory that was freed")],
)
def test_streams(size: int, method: str, instead: Callable[..., None], what: str) -> None:
    """What is lent again, and what is freed because it grew too small, is in nobody's use."""
    with pretended_streams():
        with stream_order():
            lent_on_two_streams(size)
        broken = mock.patch.object(GpuStreams, method, instead)
        with broken, stream_order(), pytest.raises(AssertionError, match=what):
            lent_on_two_streams(size)
