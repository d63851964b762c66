"""What `--host fsdp2` reads of a DeepSpeed config, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.command_parser import read_json
from sdp_deepspeed.config import KEY, SILENCE_LIMIT
from sdp_deepspeed.training.fsdp_settings import read_settings
from sdp_deepspeed.training.options import fill_automatic
from tests.helpers.repository import ROOT

RIGHT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    KEY: {"coverage": 0.5},
}


def test_every_recipe_of_the_forward_regime_is_read() -> None:
    recipes = sorted((ROOT / "configs/recipes").glob("*.json"))
    assert recipes
    for path in recipes:
        config = read_json(path, "--deepspeed_config")
        fill_automatic(config, 10)
        if config.get(KEY, {}).get("regime") == "backward":
            with pytest.raises(ValueError, match='use "forward"'):
                read_settings(config, 8)
            continue
        found = read_settings(config, 8)
        assert found.bf16
        assert found.micro_batch * found.accumulation * 8 == 256
        assert found.idle == ("steps_per_print", "zero_optimization.stage")


def test_the_quickstart_has_a_twin_without_a_schedule() -> None:
    quickstart, twin = (read_json(ROOT / f"configs/{name}.json", "") for name in ("quickstart", "quickstart_fsdp2"))
    assert quickstart | {KEY: twin[KEY]} == twin
    assert twin[KEY].items() <= quickstart[KEY]["schedule"][0].items()
    fill_automatic(twin, 60)
    assert read_settings(twin, 4).micro_batch == 4


def test_defaults() -> None:
    found = read_settings(RIGHT, 4)
    assert (found.micro_batch, found.accumulation, found.clip, found.bf16, found.reduces_in) == (2, 1, 1.0, False, None)
    assert (found.rates, found.offloads, found.silence_limit, found.idle) == (None, False, SILENCE_LIMIT, ())
    assert found.block == {"coverage": 0.5}


@pytest.mark.parametrize(
    ("block", "expected", "limit"),
    [
        ({"coverage": 0.5, "silence_limit": 20.0}, {"coverage": 0.5}, 20.0),
        ({"coverage": 0.5, "silence_limit": None, "enabled": True}, {"coverage": 0.5}, None),
        ({"coverage": 0.5, "enabled": False}, None, SILENCE_LIMIT),
    ],
)
def test_the_program_watches_ranks_by_itself(
    block: dict[str, Any], expected: dict[str, Any] | None, limit: float | None
) -> None:
    found = read_settings(RIGHT | {KEY: block}, 4)
    assert (found.block, found.silence_limit) == (expected, limit)


def test_precision_offload_and_clipping() -> None:
    given = {"bf16": {"enabled": True}, "communication_data_type": "FP32", "gradient_clipping": 0.5}
    given |= {
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "wandb": {"enabled": False, "team": "x"},
    }
    given |= {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    found = read_settings(RIGHT | given, 4)
    assert (found.bf16, found.reduces_in, found.clip) == (True, "fp32", 0.5)
    assert (found.offloads, found.pin_memory, found.idle) == (True, True, ("zero_optimization.stage",))
    off = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    assert not read_settings(RIGHT | off, 4).offloads
    off["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert read_settings(RIGHT | off, 4).offloads


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp16": {"enabled": True}}, "^--host fsdp2: fp16: .*bf16"),
        ({"tensorboard": {"enabled": True}}, "tensorboard: .*metrics.jsonl"),
        ({"activation_checkpointing": {"partition_activations": True}}, "take --gradient-checkpointing"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown .*did you mean 'gradient_clipping'"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown: .*remove it, or take --host deepspeed"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "got {'device': 'nvme'}, expected {\"device\": ",
        ),
        ({"zero_optimization": {"offload_param": True}}, "offload_param: got True, expected"),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": "no"}}}, "pin_memory: got 'no'"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled: got 'auto', expected true or false"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "offload_optimizer: ratio"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update"),
        ({"bf16": {"enable": True}}, "bf16.enable: did you mean 'enabled'"),
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"data_types": {"grad_accum": "fp32"}}, "data_types.grad_accum: has no effect"),
        ({"optimizer": {"type": "AdamW", "parms": {"lr": 0.5}}}, "optimizer.parms: did you mean 'params'"),
        ({"scheduler": {"typ": "WarmupLR"}}, "scheduler.typ: did you mean 'type'"),
        ({"scheduler": {"params": {"warmup_num_steps": 2}}}, "scheduler.type: there is none"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage: got 7, expected 0, 1, 2 or 3"),
        ({"optimizer": {"type": "AdamW", "params": {"differentiable": True}}}, "optimizer.params.differentiable"),
        ({KEY: {"coverage": 0.5, "regime": "backward"}}, "regime: got 'backward'.*use \"forward\""),
        ({KEY: {"coverage": 0.5, "redraw_interval": 5}}, "redraw_interval: got 5"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype: got 'bf16', expected \"fp32\""),
        (
            {KEY: {"schedule": [{"until_step": 2, "coverage": 0.5}, {"coverage": 1.0}]}},
            "schedule: .*same command again",
        ),
        ({"optimizer": {"type": "Lion"}, "fp16": {"enabled": True}}, "fp16: .*\n  optimizer.type: got 'Lion'"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type: got 'OneCycle'"),
        ({"train_batch_size": 3}, "--host fsdp2: train_batch_size is 3, but 4 ranks"),
        ({"subnetwork_data_paralel": {"coverage": 0.5}}, "unknown top-level key"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_settings(RIGHT | given, 4)
