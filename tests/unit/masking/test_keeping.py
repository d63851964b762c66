"""Whether the dense model stays between two batches: one answer for all ranks, from their memory and their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.masking.free_memory import FreeMemory
from sdp_deepspeed.masking.keeping import Vote, decide, fingerprint

CPU = torch.device("cpu")


def vote(*, pool: str = "a", shared: int = 100, own: int = 0, has: int = 0, needs: int = 50, **other: Any) -> Vote:
    return Vote(
        wants=other.get("wants"),
        memory=other.get("memory", FreeMemory(pool, shared, own, 100)),
        has=has,
        needs=needs,
        is_valid=other.get("is_valid", False),
    )


@pytest.mark.parametrize(
    ("votes", "keeps"),
    [
        ([vote()], True),
        ([vote(needs=75)], True),
        ([vote(needs=76)], False),  # a quarter must be left
        ([vote(needs=76, own=1)], True),  # what the allocator has reserved counts
        ([vote(needs=76, has=1)], True),  # what it has already is no need
        ([vote(), vote(needs=76, pool="b")], False),  # the rank with the least decides for all
        ([vote(needs=40), vote(needs=40)], False),  # both take it from one pool
        ([vote(needs=40), vote(needs=40, pool="b")], True),
        ([vote(needs=30), vote(needs=30, shared=90)], True),
        ([vote(needs=30), vote(needs=30, shared=80)], False),  # the last look at it counts
        ([vote(), vote(memory=None)], False),
        ([vote(), vote(wants=False)], False),
        ([vote(wants=True, memory=None), vote(wants=True, memory=None)], True),
        ([vote(wants=True, needs=99)], True),
        ([vote(has=50, is_valid=True, shared=13)], True),  # an eighth is enough to go on
        ([vote(has=50, is_valid=True, shared=12)], False),
        ([vote(has=50, is_valid=True, shared=13, pool="b"), vote(has=50, shared=13)], False),  # all begin anew
    ],
)
def test_decision(votes: list[Vote], keeps: bool) -> None:
    found = decide(votes)
    assert found.keeps == keeps
    assert found.is_valid == (keeps and all(vote.is_valid for vote in votes))
    assert found.reason
    assert decide(votes[::-1]).keeps == keeps


def test_the_reason_says_what_is_left() -> None:
    text = decide([vote(needs=50), vote(needs=80, pool="b")]).reason
    assert text == "20 bytes of 100 bytes would be left where memory is shortest, 25.0% must be"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 1020, 1021, 5000])
def test_every_change_is_seen(dtype: torch.dtype, size: int) -> None:
    """Of one element by its last bit, of all signs, and of places."""
    tensors = [torch.randn(size).to(dtype), torch.randn(3).to(dtype)]
    before = fingerprint(tensors, CPU)
    assert torch.equal(fingerprint([tensor.clone() for tensor in tensors], CPU), before)
    assert before.dtype == torch.int64
    for place in {0, size // 2, size - 1} if size else ():
        changed = tensors[0].clone()
        changed.view(torch.uint8)[place * changed.element_size()] ^= 1
        assert not torch.equal(fingerprint([changed, tensors[1]], CPU), before)
    assert torch.equal(fingerprint([], CPU), torch.empty(0, dtype=torch.int64))


def test_changes_that_keep_sums_are_seen() -> None:
    """Signs, and rows that change places."""
    weight = torch.randn(64, 128)
    before = fingerprint([weight.view(-1)], CPU)
    assert not torch.equal(fingerprint([-weight.view(-1)], CPU), before)
    for first, second in ((0, 1), (3, 60)):
        swapped = weight.clone()
        swapped[[first, second]] = weight[[second, first]]
        assert not torch.equal(fingerprint([swapped.view(-1)], CPU), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("factor", [2, -1])
def test_many_equal_changes_do_not_cancel(dtype: torch.dtype, offset: int, factor: int) -> None:
    """A factor on part of a tensor changes one bit of each element by the same; wherever the tensor begins."""
    weight = torch.randn(1021 * 513 + offset).to(dtype)[offset:]
    before = fingerprint([weight], CPU)
    weight[: 1021 * 512] *= factor
    assert not torch.equal(fingerprint([weight], CPU), before)
