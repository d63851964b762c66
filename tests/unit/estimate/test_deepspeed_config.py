"""What an estimate reads of a DeepSpeed config, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.deepspeed_config import Settings, deepspeed_setup, fsdp2_setup, read_settings, without_auto
from sdp_deepspeed.estimate.fsdp2_bytes import FSDP2Setup


def test_what_decides_bytes() -> None:
    setup = deepspeed_setup(
        {
            "fp16": {"enabled": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "optimizer": {"type": "Lion"},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 7e3}
            | {"offload_optimizer": {"device": "cpu"}},
        },
        3,
    )
    assert (setup.stage, setup.accumulation, setup.offload, setup.bucket_elements) == (2, 3, True, 7000)
    precision = setup.precision
    assert (precision.weights, precision.gradients, precision.wire, precision.num_moments) == (2, 4, 4, 1)
    plain = deepspeed_setup({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "bf16": None}, 1)
    assert (plain.stage, plain.precision.weights, plain.precision.num_moments) == (0, 4, 1)
    assert read_settings({"bfloat16": {"enabled": True}}).dtype == "bf16"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "deepspeed.zero_optimization.stage: got 4"),
        ({"zero_optimization": {"stage": "1"}}, "deepspeed.zero_optimization.stage: got '1'"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "deepspeed.zero_optimization.reduce_bucket_size: got 0"),
        ({"tensor_parallel": {"autotp_size": 2}}, "deepspeed.tensor_parallel.autotp_size: got 2"),
        ({"optimizer": {"type": "Adafactor"}}, "deepspeed.optimizer.type: optimizer 'Adafactor'"),
        ({"optimizer": {"type": "Muon"}}, "deepspeed.optimizer.type: Muon cannot be estimated"),
        ({"optimizer": {"type": "Mine"}}, "deepspeed.optimizer.type: optimizer 'Mine' is not known"),
        ({"bf16": 3}, "deepspeed.bf16: got 3"),
        ({"fp16": {"enabled": "false"}}, "deepspeed.fp16.enabled: got 'false'"),
        ({"train_batch_size": 0}, "deepspeed.train_batch_size: got 0"),
        ({"communication_data_type": "fp8"}, "deepspeed.communication_data_type: got 'fp8'"),
    ],
)
def test_what_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_settings(config)


BLOCK = {KEY: {"coverage": 0.5}}


def test_what_decides_bytes_under_fsdp2() -> None:
    """Shards are fp32 in any case."""
    assert fsdp2_setup(BLOCK, 2) == FSDP2Setup(accumulation=2)
    bf16 = BLOCK | {"bf16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    assert fsdp2_setup(bf16, 1) == FSDP2Setup(compute=2, wire=2, num_moments=1)
    assert fsdp2_setup(bf16 | {"communication_data_type": "fp32"}, 1).wire == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({KEY: {"coverage": 0.5, "regime": "backward"}}, "regime: .*gathers a unit"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload"),
        ({"fp16": {"enabled": True}}, "loss scaling"),
    ],
)
def test_what_is_refused_under_fsdp2(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fsdp2_setup(BLOCK | config, 1)


def test_auto_is_what_the_trainer_fills_in() -> None:
    """The block's own "auto" stays, and phases at shares of a run get some number of steps."""
    block = {"subnetworks": "auto", "schedule": [{"coverage": 0.5, "until": 0.5}, {"coverage": 1.0}]}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        KEY: block,
    }
    filled = without_auto(config, micro_batch=2, accumulation=5, dtype="bf16")
    assert filled.pop(KEY) == block | {"total_steps": 10**6}
    assert filled == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 1},
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 24}, (6, 1)),
        ({"train_micro_batch_size_per_gpu": 5}, (5, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}, (2, 5)),
    ],
)
def test_batch_sizes(config: dict[str, Any], expected: tuple[int, int]) -> None:
    assert Settings(**config).micro_steps(4) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "train_micro_batch_size_per_gpu: missing"),
        ({"train_batch_size": 3}, "or a larger train_batch_size"),
        ({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2}, "got 25, but 4 ranks .* is 24"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, "got 4, but 4 ranks .* is 0"),
    ],
)
def test_batch_sizes_that_contradict_each_other(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**config).micro_steps(4)
