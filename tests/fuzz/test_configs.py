"""Configs that somebody got wrong: read, or refused with the name of what is wrong; nothing else is raised."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.planner import num_subnetworks
from sdp_deepspeed.support.combinations import Combination, all_combinations
from sdp_deepspeed.support.refusals import refuse_unsupported, without_effect
from tests.helpers.hostile import json_values, mutated, refusal_of
from tests.helpers.properties import fuzzed

COMBINATIONS = list(all_combinations())
EVERYTHING: dict[str, Any] = {
    "enabled": True,
    "regime": "backward",
    "strategy": {"attention": "neuron", "mlp": "block"},
    "coverage": 0.5,
    "subnetworks": "auto",
    "granularity": "sublayer",
    "assignment": "auto",
    "shared": [r"\.0\."],
    "neuron_groups": 4,
    "dense_branch_scale": "none",
    "lr_by_coverage": "sqrt",
    "evaluation": "auto",
    "seed": 3,
    "allow_optimizer": False,
    "check_agreement": True,
    "checkpoint": {"asynchronous": True, "keep_last": 2},
}
# More of what DeepSpeed takes and we look at.
HOST: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "communication_data_type": "fp32",
    "prescale_gradients": False,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": False},
    "activation_checkpointing": {"partition_activations": False},
    "tensor_parallel": {"autotp_size": 2},
    "checkpoint": {"load_universal": False},
    "flops_profiler": {"enabled": False},
    "csv_monitor": {"enabled": False},
}


def with_block(combination: Combination) -> dict[str, Any]:
    return HOST | combination.config()


CONFIGS = st.sampled_from(COMBINATIONS).map(with_block)


@fuzzed()
@given(mutated(st.just(EVERYTHING)) | json_values())
def test_blocks(block: Any) -> None:
    refusal = refusal_of(lambda: parse({KEY: block}))
    if refusal is not None:
        assert KEY in refusal
        assert len(refusal) < 4000
        return
    parsed = parse({KEY: block})
    assert parsed is None or parse({KEY: parsed.model_dump()}) == parsed


@fuzzed()
@given(mutated(st.just({"holders": 2, "subnetworks": 4})), st.integers(1, 9))
def test_counts(block: Any, num_ranks: int) -> None:
    def counts() -> None:
        parsed = parse({KEY: block})
        if parsed is not None:
            assert num_ranks % num_subnetworks(parsed, num_ranks) == 0

    refusal = refusal_of(counts)
    assert refusal is None or KEY in refusal


@fuzzed()
@given(mutated(CONFIGS))
def test_whole_configs(config: Any) -> None:
    def start() -> None:
        block = parse(config)
        if block is not None:
            refuse_unsupported(block, config)
            without_effect(block, config)

    assert refusal_of(start) != ""


def test_something_is_accepted() -> None:
    """Otherwise the tests above would look at refusals only."""
    assert parse({KEY: EVERYTHING}) is not None
    block = parse(with_block(Combination()))
    assert block is not None
    refuse_unsupported(block, with_block(Combination()))
    with pytest.raises(ValueError, match=KEY):
        parse({KEY: EVERYTHING | {"coverage": 2}})
