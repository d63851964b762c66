"""Buckets are in the order in which the backward pass completes them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch

from sdp_deepspeed.parallel.bucket_layouts import plan_buckets
from sdp_deepspeed.plan.tensors import dense_tensors, pieces_by_tensor
from sdp_deepspeed.planner import plan_model
from tests.helpers.models import llama, parsed

SHAPES = {info.name: info.shape for info in dense_tensors(llama(4))}
DTYPES = {name: torch.bfloat16 if "norm" in name else torch.float32 for name in SHAPES}
GROUPS = {name: int(len(shape) == 1) for name, shape in SHAPES.items()}


def test_order_is_that_of_backward() -> None:
    model, names = llama(4), list(SHAPES)
    pieces = pieces_by_tensor(dense_tensors(model), plan_model(model, parsed(holders=2), 3)[0])
    layouts = plan_buckets(pieces, SHAPES, DTYPES, GROUPS, bucket_size=600, tp_replicated=())
    last_ready = [min(names.index(part.piece.parameter) for part in each.slices) for each in layouts]
    assert last_ready == sorted(last_ready, reverse=True)
    held: list[Counter[int]] = [Counter() for _ in range(layouts[-1].depth_range + 1)]  # elements by depth range
    for each in layouts:
        held[each.depth_range].update(dict.fromkeys(each.holders, each.num_elements))
    assert all(max((one + other).values()) > 600 for one, other in pairwise(held)), "no two ranges fit into one"
