"""Buckets: their order is one for all ranks, every trained element is in one of them, and depth cuts them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sdp_deepspeed.parallel.bucket_layouts import plan_buckets
from sdp_deepspeed.parallel.buckets import BucketLayout
from tests.helpers.sliced_models import SlicedModel, random_model, sliced_model


def _planned(model: SlicedModel, bucket_size: int) -> list[BucketLayout]:
    dtypes = {name: torch.bfloat16 if "norm" in name else torch.float32 for name in model.shapes}
    return plan_buckets(model.pieces, model.shapes, dtypes, model.groups, bucket_size=bucket_size)


@pytest.mark.parametrize("seed", range(40))
def test_every_element_has_one_place_and_one_owner(seed: int) -> None:
    model = random_model(1 + seed % 5, seed)
    owned: Counter[tuple[str, int, int]] = Counter()
    for layout in _planned(model, 20):
        assert layout.size % len(layout.holders) == 0
        assert 0 <= layout.size - layout.num_elements < len(layout.holders)
        for position in range(len(layout.holders)):
            for part, start, end in layout.owned(position):
                assert (part.piece, layout.holders) in model.pieces[part.piece.parameter]
                assert layout.param_group == model.groups[part.piece.parameter]
                owned.update((part.piece.parameter, part.piece.start, i) for i in range(start, end))
    assert set(owned.values()) == {1}
    assert len(owned) == sum(shape.numel() for shape in model.shapes.values())


def test_no_rank_holds_more_than_the_bucket_size_in_a_depth_range() -> None:
    model = sliced_model(4, "neuron", num_layers=6)
    for bucket_size in (1, 30, 60, 1000):
        load: Counter[tuple[int, int]] = Counter()
        tensors: dict[int, set[str]] = {}
        for layout in _planned(model, bucket_size):
            tensors.setdefault(layout.depth_range, set()).update(part.piece.parameter for part in layout.slices)
            load.update({(layout.depth_range, rank): layout.num_elements for rank in layout.holders})
        assert all(size <= bucket_size or len(tensors[index]) == 1 for (index, _), size in load.items())
        assert sum(len(names) for names in tensors.values()) == len(model.shapes), "a tensor is in one range"
    assert len(tensors) == 1, "as few ranges as possible"


def test_order_is_that_of_backward() -> None:
    model = sliced_model(3, "block", num_layers=4)
    names = list(model.shapes)
    last_ready = [min(names.index(part.piece.parameter) for part in each.slices) for each in _planned(model, 25)]
    assert last_ready == sorted(last_ready, reverse=True)


def test_tensors_of_other_dtypes_and_replicas_have_their_own_buckets() -> None:
    model = sliced_model(2, "block")
    dtypes = {name: torch.bfloat16 if "norm" in name else torch.float32 for name in model.shapes}
    layouts = plan_buckets(
        model.pieces, model.shapes, dtypes, model.groups, bucket_size=10**6, tp_replicated=["layer0.norm", "embed"]
    )
    for layout in layouts:
        for part in layout.slices:
            assert dtypes[part.piece.parameter] == layout.dtype
            assert layout.is_tp_replicated == (part.piece.parameter in {"layer0.norm", "embed"})
