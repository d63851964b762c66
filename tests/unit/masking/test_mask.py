"""A masked module computes what the dense model with zeroed pieces computes (forward regime), or what the dense model
computes (backward regime), for every family; and the dense model comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.common.held_bytes import storage_bytes
from sdp_deepspeed.config import MODES
from sdp_deepspeed.units import Regime
from tests.helpers.core_masks import (
    NAMES,
    absent_pieces,
    assert_masked,
    build,
    families,
    mask_of,
    plan_of,
    strategy_of,
    tokens,
)


@pytest.mark.parametrize(("regime", "strategy"), MODES)
@pytest.mark.parametrize("name", families(NAMES))
def test_masked_is_zeroed_or_dense(name: str, regime: Regime, strategy: str) -> None:
    in_layers = "sublayer" if name == "llama_one_layer" else "layer"
    for rank, granularity, is_scaled in ((0, "sublayer", False), (0, "sublayer", True), (1, in_layers, True)):
        dense = build(name)
        plan = plan_of(dense, regime, strategy_of(name, strategy), granularity=granularity)
        model, mask = assert_masked(dense, plan, rank, is_scaled=is_scaled)
        absent = absent_pieces(mask)
        assert absent
        if regime == "forward":
            tensors = dict(dense.named_parameters()) | dict(dense.named_buffers())
            num_bytes = sum(p.num_elements(mask.shapes[p.parameter]) * tensors[p.parameter].itemsize for p in absent)
            own = [branch.parameters for branch in mask.branches]  # of a layer: one element is read as all of it
            stored, whole = (storage_bytes([*each.parameters(), *each.buffers()]) for each in (model, dense))
            assert stored <= whole - num_bytes + 8 * sum(map(len, own))


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "gpt_neox_parallel"])
def test_parts_may_be_neurons_blocks_or_shared(name: str, regime: Regime) -> None:
    """On padded batches, with eager attention."""
    dense = build(name)
    dense.set_attn_implementation("eager")
    padded = torch.ones_like(tokens())
    padded[0, :3] = 0
    choices: list[tuple[Any, tuple[str, ...]]] = [
        ({"attention": "neuron", "mlp": "block"}, ()),
        ({"mlp": "neuron"}, ()),
        ("neuron", (r"\.0\.attention\.head_0$", r"\.1\.mlp\.group_1$")),
    ]
    for strategy, shared in choices:
        plan = plan_of(dense, regime, strategy, shared=shared)
        assert_masked(dense, plan, 1, attention_mask=padded)
        if not shared:
            assert_masked(dense, plan, 1, attention_mask=padded, is_scaled=True)
        elif regime == "forward":
            with pytest.raises(ValueError, match=r"branch_scale.*0\.attention' have coverage \[0\.5, 1\.0\]"):
                mask_of(dense, plan, 1, is_scaled=True)
