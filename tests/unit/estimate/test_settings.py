"""What a forecast reads of a DeepSpeed config, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.settings import (
    micro_steps,
    optimizer_of,
    refuse_plain,
    setup_of,
    sharded_setup_of,
    with_groups,
    without_auto,
)
from sdp_deepspeed.estimate.sharded import ShardedSetup
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.models import llama


@pytest.mark.parametrize("key", ["zero_optimization", "bf16", "fp16", "optimizer", "data_types"])
def test_parts_that_are_no_objects(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}: got 3, expected an object"):
        setup_of({key: 3}, 1)


def test_what_decides_bytes() -> None:
    setup = setup_of(
        {
            "fp16": {"enabled": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "optimizer": {"type": "Lion"},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 7}
            | {"offload_optimizer": {"device": "cpu"}},
        },
        3,
    )
    assert (setup.stage, setup.accumulation, setup.offload, setup.bucket_elements) == (2, 3, True, 7)
    precision = setup.precision
    assert (precision.weights, precision.gradients, precision.wire, precision.num_moments) == (2, 4, 4, 1)
    plain = setup_of({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 1)
    assert (plain.stage, plain.precision.weights, plain.precision.num_moments) == (0, 4, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 cannot be estimated; possible are"),
        ({"zero_optimization": {"stage": "1"}}, "zero_optimization.stage '1' cannot be estimated; possible are"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel cannot be estimated: leave it out"),
        ({"optimizer": {"type": "Adafactor"}}, "optimizer.type 'Adafactor' cannot be estimated"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type 'OneBitAdam' cannot be estimated"),
    ],
)
def test_what_has_no_formula_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        setup_of(config, 1)
    setup_of({"tensor_parallel": {"autotp_size": 1}}, 1)


BLOCK = {KEY: {"coverage": 0.5}}


def test_what_decides_bytes_under_fsdp2() -> None:
    """Shards are fp32 in any case."""
    assert sharded_setup_of(BLOCK, 2) == ShardedSetup(accumulation=2)
    bf16 = BLOCK | {"bf16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    assert sharded_setup_of(bf16, 1) == ShardedSetup(compute=2, wire=2, num_moments=1)
    assert sharded_setup_of(bf16 | {"communication_data_type": "fp32"}, 1).wire == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({KEY: None}, "FSDP2: give"),
        ({KEY: {"coverage": 0.5, "regime": "backward"}}, "regime: .*gathers a unit"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload"),
        ({"optimizer": {"type": "Muon"}}, "whole tensors"),
        ({"fp16": {"enabled": True}}, "loss scale"),
    ],
)
def test_what_has_no_formula_under_fsdp2(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sharded_setup_of(BLOCK | config, 1)


def test_muon_gets_what_deepspeed_gives_it() -> None:
    """Its momentum is one of two moments; the embedding, the head and the norms are its Adam's."""
    import deepspeed

    model = llama()
    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
    found = with_groups(dense_tensors(model), optimizer_of({"optimizer": {"type": "Muon"}}))
    assert {info.name: info.is_whole for info in found} == {
        name: vars(parameter)["use_muon"] for name, parameter in model.named_parameters()
    }
    assert {info.is_whole for info in found} == {True, False}
    setup = setup_of({"optimizer": {"type": "Muon"}, "bf16": {"enabled": True}}, 1)
    assert {setup.moment_bytes(info.group) for info in found if info.is_whole} == {4}
    assert {setup.moment_bytes(info.group) for info in found if not info.is_whole} == {8}
    with pytest.raises(ValueError, match="plain DeepSpeed with Muon cannot be estimated"):
        refuse_plain({"optimizer": {"type": "Muon"}})


def test_who_steps_whole_tensors() -> None:
    assert {(info.is_whole, info.group) for info in with_groups(dense_tensors(llama()), "adamw")} == {(False, 0)}


def test_what_is_left_to_the_trainer_is_filled_in() -> None:
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
    assert micro_steps(config, 4) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "give train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 3}, "or a larger train_batch_size"),
        ({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2}, "is 25, but 4 ranks .* make 24"),
        ({"train_batch_size": 26}, "is 26, but 4 ranks with micro-batches of 6 and 1 micro-steps make 24"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, "is 4, but 4 ranks .* make 0"),
    ],
)
def test_batch_sizes_that_contradict_each_other(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        micro_steps(config, 4)
