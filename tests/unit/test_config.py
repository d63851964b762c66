"""The config block: what is read, and every message about what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse

# Top-level keys of DeepSpeed 0.19.8, Accelerate's and the Trainer's included.
HOST_KEYS = re.findall(
    r"\w+",
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
    scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print bf16 bfloat16 fp16
    torch_autocast gradient_clipping communication_data_type seq_parallel_communication_data_type prescale_gradients
    gradient_predivide_factor gradient_allreduce_op disable_allgather dump_state disable_python_gc vocabulary_size
    wall_clock_breakdown memory_breakdown checkpoint data_types dataloader_drop_last
    use_data_before_expert_parallelism log_level zero_optimization activation_checkpointing comms_logger tensorboard
    wandb csv_monitor comet flops_profiler autotuning datastates_ckpt hybrid_engine pipeline data_efficiency aio
    weight_quantization compile timers tensor_parallel expert_parallel sequence_parallel_size amp sparse_attention
    curriculum_learning elasticity sparse_gradients compression_training nebula data_parallel_size
    """,
)


def read(**settings: Any) -> SubnetworkConfig:
    config = parse({KEY: {"coverage": 0.5, **settings}})
    assert config is not None
    return config


def message(ds_config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers look at the message
        parse(ds_config)
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


def test_every_key_is_read() -> None:
    settings: dict[str, Any] = {
        "enabled": True,
        "regime": "backward",
        "strategy": {"attention": "neuron", "mlp": "block"},
        "coverage": 1,
        "subnetworks": "auto",
        "granularity": "layer",
        "assignment": "auto",
        "shared": [r"layers\.0\."],
        "neuron_groups": 3,
        "branch_scale": "none",
        "seed": 0,
        "allow_optimizer": True,
        "check_agreement": True,
        "checkpoint": {"asynchronous": True, "keep_last": 2, "verify": False},
    }
    config = parse({KEY: settings})
    assert config is not None
    others = dict.fromkeys(("holders", "schedule", "redraw_interval", "total_steps", "local_steps"))
    assert {**settings, "shared": (r"layers\.0\.",)} | others == config.model_dump()
    assert settings.keys() | others.keys() == SubnetworkConfig.model_fields.keys()
    steps = {"teams": 4, "every": 10, "outer_lr": 0.7, "outer_momentum": 0.9}
    steps |= {"wait_timeout": 60.0, "exchange_timeout": 5.0}
    assert read(local_steps=steps).model_dump()["local_steps"] == steps


def test_resolved_block_reads_back() -> None:
    """The run folder's config.json holds every key, defaults included."""
    config = read(seed=3)
    assert parse({KEY: config.model_dump()}) == config
    assert parse({KEY: config.model_dump(mode="json")}) == config


@pytest.mark.parametrize(
    "name",
    [
        *("subnetwork_dataparallel", "subnetworks_data_parallel", "subnetwork_parallel", "Subnetwork-Data-Parallel"),
        *("SubnetworkDataParallel", "sub_network_data_parallel", "subnet_data_parallel", "subnetwork", "SDP"),
    ],
)
def test_near_misses_of_the_name(name: str) -> None:
    text = message({name: {"coverage": 0.5}})
    assert repr(name) in text
    assert KEY in text
    assert repr(name) in message({KEY: {"coverage": 0.5}, name: {}})


def test_keys_of_hosts_are_no_near_misses() -> None:
    assert [name for name in HOST_KEYS if parse({name: {}}) is not None] == []


@pytest.mark.parametrize("value", [True, None, 0.5, "forward", [0.5]])
def test_block_must_be_an_object(value: Any) -> None:
    assert message({KEY: value}).startswith(f"{KEY}: got {value!r}, expected an object")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("covrage", "coverage"), ("Coverage", "coverage"), ("holder", "holders"), ("enabeld", "enabled")],
)
def test_unknown_keys_name_the_nearest(name: str, suggestion: str) -> None:
    assert message({KEY: {"coverage": 0.5, name: 1}}) == f"{KEY}.{name}: unknown key; did you mean {suggestion!r}?"
    inside = message({KEY: {"coverage": 0.5, "checkpoint": {"keep": 2, 1: 2}}})
    assert f"{KEY}.checkpoint.keep: unknown key; did you mean 'keep_last'?" in inside
    assert f"{KEY}.checkpoint.1: keys must be strings" in inside
    outer = message({KEY: {"coverage": 0.5, "local_steps": {"teams": 2, "outer_lr": 0, "outer_momentum": 1.0}}})
    assert f"{KEY}.local_steps.every: missing, expected an integer, at least 2" in outer
    assert f"{KEY}.local_steps.outer_lr: got 0, expected a number above 0" in outer
    assert f"{KEY}.local_steps.outer_momentum: got 1.0, expected a number from 0 to below 1" in outer


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("coverage", 0, "above 0 and at most 1"),
        ("coverage", 1.5, "above 0 and at most 1"),
        ("coverage", True, "above 0 and at most 1"),
        ("coverage", float("nan"), "above 0 and at most 1"),
        ("holders", 0, "an integer, at least 1"),
        ("local_steps", 10, 'a mapping such as {"teams": 4, "every": 10}'),
        ("holders", 1.5, "an integer, at least 1"),
        ("enabled", "yes", "true or false"),
        ("regime", "backwards", '"forward" or "backward"'),
        ("regime", "auto", '"auto" is only possible for subnetworks, assignment and total_steps'),
        ("strategy", "blocks", '"block", "neuron"'),
        ("strategy", {"mlp": "blocks"}, '"block", "neuron"'),
        ("subnetworks", 0, '"auto" or an integer'),
        ("subnetworks", "nodes", '"auto" or an integer'),
        ("granularity", "sub-layer", '"sublayer" or "layer"'),
        ("assignment", "cyclic", '"auto" or the path'),
        ("shared", "layers", "a list of regular expressions"),
        ("shared", ["(", "a"], "'(' does not compile"),
        ("neuron_groups", 0, "at least 1"),
        ("branch_scale", 0.5, '"training" or "none"'),
        ("seed", -1, "at least 0"),
        ("allow_optimizer", 1, "true or false"),
        ("check_agreement", "true", "true or false"),
    ],
)
def test_wrong_values(name: str, value: Any, expected: str) -> None:
    text = message({KEY: {"coverage": 0.5, name: value}})
    assert text.startswith(f"{KEY}.{name}: ")
    assert expected in text
    assert "\n" not in text


def test_all_problems_in_one_message() -> None:
    lines = message({KEY: {"coverage": 2, "regime": "x", "color": 1}}).split("\n")
    assert lines[0] == f"{KEY}: 3 problems:"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {f"{KEY}.{n}" for n in ("coverage", "regime", "color")}


def test_local_steps_in_a_phase() -> None:
    steps = {"teams": 2, "every": 10}
    for number, phases in enumerate(
        ([{"until_step": 5, "local_steps": steps}, {}], [{"until_step": 5}, {"local_steps": steps}])
    ):
        text = message({KEY: {"coverage": 0.5, "schedule": phases}})
        assert text.startswith(f"{KEY}.schedule[{number}].local_steps: teams have one plan")


def test_keys_that_the_rest_of_the_block_makes_pointless_are_errors() -> None:
    """Each row of the table that docs/config.md shows, once."""
    plan = {"assignment": "plan.json"}
    rules = [{"coverage": 0.5, "whole_ends": 1}]
    for settings, name in [
        ({"coverage": 0.5, "holders": 2}, "coverage"),
        ({**plan, "redraw_interval": 5}, "redraw_interval"),
        ({"coverage": 0.5, "subnetworks": 2, "local_steps": {"teams": 2, "every": 2}}, "subnetworks"),
        ({"coverage": 0.5, "check_agreement": True, "local_steps": {"teams": 2, "every": 2}}, "check_agreement"),
        ({"coverage": 0.5, "checkpoint": {"verify": False}, "local_steps": {"teams": 2, "every": 2}}, "checkpoint"),
        ({"coverage": 0.5, "strategy": "neuron", "granularity": "layer"}, "granularity"),
        ({"coverage": 0.5, "neuron_groups": 2}, "neuron_groups"),
        ({**plan, "coverage": rules}, "coverage"),
        ({**plan, "shared": ["a"]}, "shared"),
        ({**plan, "seed": 1}, "seed"),
    ]:
        assert message({KEY: settings}).startswith(f"{KEY}.{name}: got ")
    read(strategy={"attention": "block", "mlp": "neuron"}, granularity="layer", neuron_groups=2)
