"""On a GPU: backward is not held up, nothing is read, written or freed while another stream uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator, Done
from sdp_deepspeed.exchange.averaging import Averaging
from sdp_deepspeed.exchange.backward_averaging import BackwardAveraging
from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.exchange.routes import Half
from sdp_deepspeed.exchange.streams import GpuStreams, NoStreams
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import num_elements
from tests.helpers.mailbox import Delivery
from tests.helpers.stream_order import Stream, order_here
from tests.helpers.toy_training import Toy, by_hand, compare, run_toy, toy_of

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
HARD: dict[str, Any] = {"num_micro": 2, "num_steps": 2, "clip": 20.0, "twice": 0.2, "failing": 0.2}


@pytest.mark.parametrize(("regime", "nodes"), [("forward", "one"), ("backward", "halves")])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("overlap", [0, 1])
def test_streams_wait_for_one_another(overlap: int, stage: int, regime: str, nodes: str) -> None:
    """Each rank trains on a stream of its own; gradients are computed on two more."""
    toy = toy_of(3, 4, regime, 40, nodes, stage=stage, overlap=overlap, **HARD)
    compare(toy, run_toy(replace(toy, num_streams=2, checks_order=True)), by_hand(toy))


@pytest.mark.parametrize("nodes", ["one", "halves"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_backward_passes_that_fail(stage: int, nodes: str) -> None:
    """On some ranks, after half of their gradients: what came counts, and nobody is out of step."""
    toy = toy_of(3, 4, "forward", 40, nodes, stage=stage, overlap=1, num_micro=4, failing=0.4)
    fails = [toy.fails(rank, step, micro) for rank in range(4) for step in range(2) for micro in range(4)]
    assert any(fails)
    assert not all(fails)
    compare(toy, run_toy(toy), by_hand(toy))


@pytest.mark.parametrize(("overlap", "expected"), [(0, 0), (1, 2)])
def test_backward_is_not_held_up(overlap: int, expected: int) -> None:
    """When a bucket has left, the stream of its gradients waits for neither its collective nor the one before."""
    toy = toy_of(3, 4, "forward", 40, overlap=overlap, checks_order=True, missing=0.0, num_steps=1)
    behind, send = list[int](), BackwardAveraging._send

    def watched(averaging: Any, bucket: Bucket) -> None:
        send(averaging, bucket)
        order = order_here()
        assert order is not None
        behind.append(len(order.collectives) - sum(number in order.current.clock for number in order.collectives))

    with mock.patch.object(BackwardAveraging, "_send", watched):
        run_toy(toy)
    assert max(behind) == expected


def test_pretended_streams_are_like_real_ones() -> None:
    for name in ("record_event", "wait_event", "wait_stream"):
        real, pretended = (inspect.signature(getattr(kind, name)) for kind in (torch.cuda.Stream, Stream))
        assert len(pretended.parameters) <= len(real.parameters)
    assert "priority" in inspect.signature(torch.cuda.Stream.__new__).parameters


# What must be noticed, each with the places in which it matters.


@contextmanager
def beside_without_waiting(streams: Any) -> Iterator[None]:
    with torch.cuda.stream(streams._own):
        yield


def given_back_too_early(
    exchange: Exchange, leaving: torch.Tensor, sent: Half, received: Half
) -> Generator[None, None, torch.Tensor]:
    arriving = exchange.buffers.take(received.num_elements, leaving.dtype)
    work = exchange._dp_group.all_to_all(arriving, leaving, received.splits, sent.splits)
    exchange.buffers.give(leaving)
    yield
    work.wait()
    return arriving


def allocated_anew(averaging: Any, bucket: Bucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sizes = [num_elements(fragments) for _, fragments in averaging._exchange.owned(bucket)]
    flat = torch.empty(sum(sizes), dtype=torch.float32)
    return flat, list(flat.split(sizes))


def wait_without_order(delivery: Any) -> None:
    with delivery._box.order.off():
        delivery._wait()


def never_waited_for(group: Any, *arguments: Any) -> Done:
    group._dist.all_to_all_single(*arguments, group=None, async_op=True)
    return Done()


MISTAKES: list[tuple[Any, str, Callable[..., Any], tuple[int, ...]]] = [
    (GpuStreams, "join", NoStreams.join, (0, 1, 2)),
    (GpuStreams, "beside", beside_without_waiting, (0,)),
    (GpuStreams, "note", NoStreams.note, (2,)),
    (GpuStreams, "after_noted", NoStreams.after_noted, (2,)),
    (GpuStreams, "mark", NoStreams.mark, (1, 2)),
    (GpuStreams, "wait", NoStreams.wait, (1, 2)),
    (Delivery, "wait", wait_without_order, (0, 1, 2)),
    (Exchange, "_travel", given_back_too_early, (0, 1, 2)),
    (Averaging, "_borrowed", allocated_anew, (2,)),
]


@pytest.mark.parametrize(
    ("where", "method", "instead", "stage"),
    [(where, method, instead, stage) for where, method, instead, stages in MISTAKES for stage in stages],
)
@pytest.mark.slow
def test_mistakes_on_a_gpu_are_noticed(where: Any, method: str, instead: Callable[..., Any], stage: int) -> None:
    toy = toy_of(3, 4, "forward", 40, "one", stage=stage, overlap=1, num_streams=2, checks_order=True, **HARD)
    with mock.patch.object(where, method, instead), pytest.raises(AssertionError, match=r"without a wait|was freed"):
        run_toy(toy)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("where", "method", "instead", "what"),
    [
        (Communicator, "all_to_all", never_waited_for, "did not wait|sent tensor was changed"),
        (Exchange, "_travel", given_back_too_early, "sent tensor was changed|received tensor was written to"),
    ],
)
@pytest.mark.slow
def test_mistakes_on_a_cpu_are_noticed(
    where: Any, method: str, instead: Callable[..., Any], what: str, stage: int
) -> None:
    toy: Toy = toy_of(3, 4, "forward", 40, "one", stage=stage, overlap=1, **HARD)
    with mock.patch.object(where, method, instead), pytest.raises(AssertionError, match=what):
        run_toy(toy)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("num_streams", [0, 2])
@pytest.mark.parametrize("nodes", ["one", "halves"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.slow
def test_real_streams(stage: int, nodes: str, num_streams: int, device: str) -> None:
    """On a GPU collectives run on streams of their own, after random pauses: whoever reads what was received without
    having waited on the right stream, or gives a buffer back too early, gets something else. On a CPU the same code
    runs without streams."""
    num_streams *= device == "cuda"
    toy = toy_of(7, 4, "backward", 11, nodes, stage=stage, overlap=1, num_streams=num_streams, **HARD)
    expected = by_hand(toy)
    for _ in range(5 if device == "cuda" else 1):
        compare(toy, run_toy(toy, torch.device(device)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["join", "mark"])
@pytest.mark.parametrize("stage", [1, 2])
def test_mistakes_with_real_streams_are_noticed(stage: int, method: str) -> None:
    """Among a few runs: pauses are random."""
    toy = toy_of(7, 4, "backward", 11, "one", stage=stage, overlap=1, **HARD)
    expected = by_hand(toy)

    def run_often() -> None:
        for _ in range(20):
            compare(toy, run_toy(toy, torch.device("cuda")), expected)

    with mock.patch.object(GpuStreams, method, getattr(NoStreams, method)), pytest.raises(AssertionError):
        run_often()
