"""Buckets: their order is one for all ranks, every trained element is in one of them, and depth cuts them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from sdp_deepspeed.parallel.bucket_layouts import BucketLayout, plan_buckets
from sdp_deepspeed.plan.tensors import dense_tensors, pieces_by_tensor
from sdp_deepspeed.planner import plan_model
from tests.helpers.models import llama, parsed

SHAPES = {info.name: info.shape for info in dense_tensors(llama(4))}
DTYPES = {name: torch.bfloat16 if "norm" in name else torch.float32 for name in SHAPES}
GROUPS = {name: int(len(shape) == 1) for name, shape in SHAPES.items()}


def layouts(num_ranks: int, bucket_size: int, **block: Any) -> list[BucketLayout]:
    model, config = llama(4), parsed(holders=max(1, num_ranks - 1), **block)
    pieces = pieces_by_tensor(dense_tensors(model), plan_model(model, config, num_ranks)[0])
    return plan_buckets(pieces, SHAPES, DTYPES, GROUPS, bucket_size=bucket_size, tp_replicated=())


def test_no_rank_holds_more_than_the_bucket_size_in_a_depth_range() -> None:
    for bucket_size in (1, 700, 1500, 10**6):
        load: Counter[tuple[int, int]] = Counter()
        tensors: dict[int, set[str]] = {}
        for layout in layouts(4, bucket_size, strategy="neuron"):
            tensors.setdefault(layout.depth_range, set()).update(part.piece.parameter for part in layout.slices)
            load.update({(layout.depth_range, rank): layout.num_elements for rank in layout.holders})
        assert all(size <= bucket_size or len(tensors[index]) == 1 for (index, _), size in load.items())
        assert sum(len(names) for names in tensors.values()) == len(SHAPES), "a tensor is in one range"
    assert len(tensors) == 1, "as few ranges as possible"


def test_order_is_that_of_backward() -> None:
    names = list(SHAPES)
    last_ready = [min(names.index(part.piece.parameter) for part in each.slices) for each in layouts(3, 600)]
    assert last_ready == sorted(last_ready, reverse=True)
