"""Gradients on their way to host memory, and weights on theirs back, with copies as late as a device's may be."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.optimizer.host_step import Chunk, HostStep, chunks_of
from sdp_deepspeed.optimizer.settings import Offload
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.units import Piece
from tests.helpers.late_copies import LateCopies
from tests.helpers.trained_states import one_rank
from tests.helpers.training import assert_identical

SIZES = {"a": 6, "b": 11, "c": 3}
FRAGMENTS = [Fragment(Piece("a"), 1, 5), Fragment(Piece("b"), 0, 11), Fragment(Piece("c"), 2, 3)]


def weights_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(size)).to(dtype) for name, size in SIZES.items()}


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_numbers_as_on_the_device(dtype: torch.dtype, num_chunks: int) -> None:
    """Whatever fits into a buffer; each is waited for before it is filled again, the gradient before it is read."""
    plain, late = weights_of(dtype), weights_of(dtype)
    copies = LateCopies()
    bytes_of_weights = sum(fragment.num_elements for fragment in FRAGMENTS) * dtype.itemsize
    host = HostStep(copies, chunk_bytes=-(-bytes_of_weights // num_chunks))
    expected = SteppedGroup(FRAGMENTS, PieceViews(plain))
    group = SteppedGroup(FRAGMENTS, PieceViews(late), host)
    optimizers = [torch.optim.SGD(one.tensors, lr=0.25) for one in (expected, group)]
    for step in range(3):
        gradient = torch.arange(16.0) + step
        for one, optimizer in zip((expected, group), optimizers, strict=True):
            one.set_flat_gradient(gradient.clone())
            if one is group:
                host.wait()
            optimizer.step()
            one.write_back()
        assert all(torch.equal(plain[name], late[name]) for name in SIZES)
    assert copies.num_bytes == [64, host._chunk_bytes, host._chunk_bytes], "one gradient and two buffers, for all steps"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_waits_once_for_all_its_gradients(dtype: torch.dtype, stage: int) -> None:
    plain, copies = one_rank(dtype=dtype, stage=stage), LateCopies()
    with mock.patch.object(HostStep, "build", return_value=HostStep(copies)):
        offloaded = one_rank(dtype=dtype, stage=stage)
    for state in (plain, offloaded):
        for _ in range(3):
            state.step()
    assert_identical(dict(offloaded.module.state_dict()), dict(plain.module.state_dict()))
    assert copies.num_waits == 3 + 2, "for gradients in each step, and for the second and third use of a buffer"


def test_a_gradient_is_not_there_before_the_wait() -> None:
    """So that a step which forgets to wait is seen by the test above."""
    host = HostStep(LateCopies())
    received = host.receive(torch.ones(3), 0)
    assert bool(received.isnan().all())
    host.wait()
    assert received.tolist() == [1, 1, 1]
    assert host.receive(torch.zeros(3), 0) is received
    assert host.receive(torch.zeros(2), 1) is not received


def test_chunks_cover_the_master() -> None:
    """In order, none too large, each of one dtype."""
    dtypes = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32}
    chunks = chunks_of(FRAGMENTS, lambda piece: dtypes[piece.parameter], max_bytes=10)
    assert [(chunk.start, sum(chunk.sizes), chunk.dtype) for chunk in chunks] == [
        (0, 5, torch.bfloat16),
        (5, 5, torch.bfloat16),
        (10, 5, torch.bfloat16),
        (15, 1, torch.float32),
    ]
    parts = [part for chunk in chunks for part in chunk.fragments]
    for name in SIZES:
        (fragment,) = (fragment for fragment in FRAGMENTS if fragment.piece.parameter == name)
        own = [part for part in parts if part.piece == fragment.piece]
        assert (own[0].start, own[-1].stop) == (fragment.start, fragment.stop)
        assert all(one.stop == other.start for one, other in pairwise(own))
    assert chunks_of([], lambda piece: torch.float32, max_bytes=10) == list[Chunk]()


@pytest.mark.parametrize("pin", [False, True])
def test_nothing_is_copied_or_page_locked_on_a_cpu(pin: bool) -> None:
    host = HostStep.build(torch.device("cpu"), Offload(pin))
    assert host is not None
    assert not host.is_elsewhere
    gradient = torch.ones(3)
    assert host.receive(gradient, 0) is gradient
    host.wait()
    assert HostStep.build(torch.device("cpu"), None) is None


@pytest.mark.parametrize("pin", [False, True])
def test_memory_is_page_locked_if_it_is_asked_for(pin: bool) -> None:
    host = HostStep.build(torch.device("cuda", 0), Offload(pin))
    assert host is not None
    with mock.patch("torch.empty", wraps=lambda *size, pin_memory, **options: torch.ones(*size) * pin_memory):
        assert host.receive(torch.zeros(3), 0).tolist() == [0, 0, 0]
        assert host._copies is not None
        assert host._copies.memory(2, torch.float32).tolist() == [pin, pin]
