"""Units are pieces: training with row and column slices agrees with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.plan.tensors import TensorInfo
from tests.helpers.ranks import Rank
from tests.helpers.sliced_model import SliceCase, batches, loss_of, model_of, named

TWO = (
    SliceCase("backward", 1, 0),
    SliceCase("backward", 1, 1, accumulation=3),
    SliceCase("backward", 2, 1, bucket=17),
    SliceCase("backward", 1, 1, "SGD", "bf16"),
    SliceCase("backward", 1, 0, "SGD", "bf16", accumulation=3),
    SliceCase("forward", 1, 1, "SGD", "bf16+fp32", accumulation=3),
    SliceCase("forward", 1, 0),
)
THREE = (
    SliceCase("backward", 2, 1),
    SliceCase("backward", 2, 0, "SGD", accumulation=3, bucket=17),
    SliceCase("backward", 1, 1, "SGD", bucket=17),
    SliceCase("backward", 2, 1, "SGD", "bf16+fp32", accumulation=3, bucket=17),
    SliceCase("backward", 1, 0, "SGD", "bf16"),
    SliceCase("forward", 2, 1, accumulation=3, bucket=17),
    SliceCase("forward", 2, 0, "SGD"),
    SliceCase("backward", 2, 1, clip=0.0),
)


def buckets_change_nothing(rank: Rank) -> None:
    """The same bits from one bucket and from many. Two ranks, whose sum has one order; SGD without clipping, because a
    norm sums in another order."""
    results, counts = [], []
    for bucket in (10**9, 50, 7):
        case = SliceCase("backward", 1, 1, "SGD", bucket=bucket, clip=0.0)
        model = model_of(torch.float32)
        tensors = [TensorInfo(n, tuple(p.shape), p.dtype, trainable=p.requires_grad) for n, p in named(model).items()]
        optimizer = case.start(model, tensors, case.plan(rank, Communicator(dist)), Communicator(dist))
        counts.append(len(optimizer.exchange.buckets))
        source = batches(rank.size, 1, torch.float32)
        for _ in range(4):
            loss_of(model, next(source)[rank.rank][0]).backward()
            optimizer.step()
        results.append(named(model))
    assert counts[0] < counts[1] < counts[2], counts
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    if size == 2:
        yield "buckets_change_nothing", buckets_change_nothing
    for case in TWO if size == 2 else THREE:
        yield str(case), case


@pytest.mark.checks((2, 3), _cases, slow=["*bucket1000000000*"])
def test_slices(outcome: str | None) -> None:
    assert outcome is None, outcome
