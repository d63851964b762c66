"""A masked module computes what the dense model with zeroed pieces computes (forward regime), or what the dense model
computes (backward regime), for every family; and the dense model comes back."""

from __future__ import annotations

import pytest

from tests.helpers.core_masks import (
    MODES,
    NAMES,
    assert_close,
    assert_gradients,
    build,
    expected_of,
    families,
    lacking_pieces,
    masked,
    plan_of,
    run,
    stored_bytes,
    strategy_of,
)


def assert_masked(name: str, regime: str, strategy: str, rank: int, granularity: str) -> None:
    dense = build(name)
    plan = plan_of(dense, regime, strategy_of(name, strategy), granularity=granularity)
    expected_loss, expected_logits, expected = run(expected_of(dense, plan, rank))
    model, mask = masked(dense, plan, rank)
    loss, logits, found = run(model)
    assert_close(loss, expected_loss)
    assert_close(logits, expected_logits)
    assert_gradients(mask, found, expected)
    lacking = lacking_pieces(mask)
    assert lacking
    if regime == "forward":
        tensors = dict(dense.named_parameters()) | dict(dense.named_buffers())
        num_bytes = sum(p.num_elements(mask.shapes[p.parameter]) * tensors[p.parameter].itemsize for p in lacking)
        own = [branch.parameters for branch in mask.branches]  # of a layer: one element is read as all of it
        assert stored_bytes(model) <= stored_bytes(dense) - num_bytes + 8 * sum(map(len, own))


@pytest.mark.parametrize(("regime", "strategy"), MODES)
@pytest.mark.parametrize("name", families(NAMES))
def test_masked_is_zeroed_or_dense(name: str, regime: str, strategy: str) -> None:
    assert_masked(name, regime, strategy, 0, "sublayer")
    assert_masked(name, regime, strategy, 1, "sublayer" if name == "llama_one_layer" else "layer")
