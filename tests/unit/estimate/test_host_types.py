"""A value of another type in DeepSpeed's config is named by its path, not taken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from sdp_deepspeed.estimate.host_types import refuse_wrong_types


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_clipping": float("nan")}, r"gradient_clipping: got nan, expected a number of at least 0"),
        ({"gradient_clipping": "1.0"}, r"gradient_clipping: got '1\.0'"),
        ({"gradient_clipping": None}, r"gradient_clipping: got None"),
        ({"gradient_clipping": -1}, r"gradient_clipping: got -1"),
        ({"gradient_clipping": True}, r"gradient_clipping: got True"),
        ({"gradient_clipping": "auto"}, r"nobody fills in \"auto\" here"),
        ({"gradient_accumulation_steps": "2"}, r"gradient_accumulation_steps: got '2', expected a whole number"),
        ({"train_micro_batch_size_per_gpu": 2.5}, r"train_micro_batch_size_per_gpu: got 2\.5"),
        ({"managed_gradient_accumulation": "false"}, r"managed_gradient_accumulation: got 'false', expected true or"),
        ({"communication_data_type": 16}, r"communication_data_type: got 16, expected \"fp32\", \"fp16\" or \"bf16\""),
        ({"scheduler": None}, r"scheduler: got None, expected an object"),
        ({"scheduler": {"type": "WarmupLR", "params": None}}, r"scheduler\.params: got None, expected an object"),
        ({"optimizer": {"type": 3}}, r"optimizer\.type: got 3, expected a name"),
        ({"zero_optimization": []}, r"zero_optimization: got \[\], expected an object"),
        ({3: 4}, r"3: a key of the config must be text"),
        (
            {"gradient_accumulation_steps": np.int64(2)},
            r"^DeepSpeed config: gradient_accumulation_steps: got .*2.*, int64 is no JSON",
        ),
        ({"monitor": {"at": [1, torch.float32]}}, r"monitor\.at\[1\]: got torch\.float32, dtype is no JSON"),
        ({"optimizer": {"params": {"amsgrad": "false"}}}, r"optimizer\.params\.amsgrad: got 'false', text is taken as"),
        ({"optimizer": {"params": {"lr": "1e-3"}}}, r"optimizer\.params\.lr: got '1e-3'"),
        ({"optimizer": {"params": {"betas": ["0.9", 0.99]}}}, r"optimizer\.params\.betas\[0\]: got '0\.9'"),
        ({"scheduler": {"params": {"cycle_momentum": "False"}}}, r"scheduler\.params\.cycle_momentum: got 'False'"),
        ({"fp16": None, "compile": 1}, r"2 problems:\n  fp16: got None.*\n  compile: got 1"),
    ],
)
def test_wrong_types_are_named(config: dict[Any, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refuse_wrong_types(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"train_batch_size": None},
        {"gradient_accumulation_steps": 2},
        {"gradient_clipping": 0},
        {"communication_data_type": "BF16"},
        {"zero_optimization": True},
        {"bf16": None},
        {"optimizer": {"type": "AdamW", "params": None}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "total_num_steps": np.float64(3)}}},
        {"of somebody else": [1, None, ("true", "3")]},
    ],
    ids=lambda config: ", ".join(config),
)
def test_what_deepspeed_takes_passes(config: dict[str, Any]) -> None:
    refuse_wrong_types(config)
    read = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3} | config)
    assert read.train_batch_size == 3 * config.get("gradient_accumulation_steps", 1)


def test_deepspeed_cannot_log_what_is_no_json() -> None:
    """Rank 0 alone would end at that, after all ranks have built their engines."""
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": np.int64(2)})
    with pytest.raises(TypeError, match="int64 is not JSON"):
        config.print("config")


@pytest.mark.parametrize(("key", "words"), [("amp", "AMP"), ("sparse_gradients", "sparse_gradients")])
def test_deepspeed_itself_refuses_what_it_has_given_up(key: str, words: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=words):
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, key: "false"})


def test_what_cannot_be_walked_through_is_one_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"deeper": deep}
    endless: dict[str, Any] = {}
    endless["itself"] = endless
    for config in (deep, endless, {"train_batch_size": deep}, {"optimizer": [endless]}, {"optimizer": {"type": deep}}):
        with pytest.raises(ValueError, match="DeepSpeed config: nested too deeply, or a value contains itself"):
            refuse_wrong_types(config)
