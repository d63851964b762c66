"""What is combined with what, and how many combinations start-up allows."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.support.combinations import (
    AXES,
    Combination,
    all_combinations,
    refusals_of,
)
from sdp_deepspeed.support.refusals import refuse_unsupported

SAMPLE = random.Random(0).sample(list(all_combinations()), 300)


def test_every_value_of_every_axis_is_combined() -> None:
    assert [field.name for field in fields(Combination)] == list(AXES)
    combinations = list(all_combinations())
    assert len(set(combinations)) == len(combinations) == len(list(itertools.product(*AXES.values())))
    assert Combination() in combinations


def test_a_combination_is_allowed_if_start_up_does_not_refuse_it() -> None:
    for combination in SAMPLE:
        config = combination.config()
        block = parse(config)
        assert block is not None
        if not refusals_of(combination):
            refuse_unsupported(block, config)
            continue
        with pytest.raises(ValueError, match="not possible") as caught:
            refuse_unsupported(block, config)
        assert all(row.what in str(caught.value) for row in refusals_of(combination))


def test_a_value_of_an_axis_changes_the_config() -> None:
    """Two combinations with one config would count the same thing twice."""
    configs = [repr(combination.config()) for combination in all_combinations()]
    assert len(set(configs)) == len(configs)


def test_config_of_a_combination() -> None:
    plain = Combination().config()
    assert plain == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        KEY: {"holders": 1, "regime": "forward", "strategy": "block"},
    }
    combination = Combination("backward", "mixed", 2, "bf16+fp32", 2, "cpu", "caller", 2, overlap=True)
    assert combination.config(num_ranks=8, num_holders=2) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"autotp_size": 2},
        KEY: {
            "holders": 2,
            "regime": "backward",
            "strategy": {"attention": "neuron", "mlp": "block"},
            "subnetworks": 2,
        },
    }


def test_deepspeed_reads_what_a_combination_means() -> None:
    """Its own parser, on every value of every axis."""
    config_class: Any = pytest.importorskip("deepspeed").DeepSpeedConfig
    for name, values in AXES.items():
        for value in values:
            combination = replace(Combination(stage=2), **{name: value})
            read = config_class(combination.config())
            zero, offload = read.zero_config, read.zero_config.offload_optimizer
            assert (zero.stage, zero.overlap_comm) == (combination.stage, combination.overlap)
            assert (offload is not None and offload.device == "cpu") == (combination.offload == "cpu")
            assert read.float16_config.enabled == (combination.precision == "fp16")
            assert read.bfloat16_config.enabled == (combination.precision in ("bf16", "bf16+fp32"))
            assert (read.grad_accum_dtype == "fp32") == (combination.precision == "bf16+fp32")
            assert read.torch_autocast_enabled == (combination.precision == "autocast")
            assert read.managed_gradient_accumulation == (combination.accumulation != "caller")
            assert (read.gradient_accumulation_steps > 1) == (combination.accumulation != "none")
            assert max(1, read.tensor_parallel_config.autotp_size) == combination.tensor_parallel


def test_what_nothing_is_refused_for() -> None:
    """Modes, stages, tensor parallelism and replicas combine with everything."""
    for name in ("regime", "strategy", "tensor_parallel", "replicas"):
        refused = {combination for combination in SAMPLE if refusals_of(combination)}
        for combination in refused:
            others = [
                replace(combination, **{name: value}) for value in AXES[name] if value != asdict(combination)[name]
            ]
            assert all(refusals_of(other) for other in others)
    alone = [replace(Combination(stage=2), **{name: value}) for name, values in AXES.items() for value in values]
    assert [
        combination for combination in alone if refusals_of(combination) and combination.precision != "autocast"
    ] == []
