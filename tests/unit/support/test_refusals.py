"""The support table: every row that does not work is refused by name, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.support.refusals import (
    refuse_modules,
    refuse_optimizer,
    refuse_shared_memory,
    refuse_unsupported,
    without_effect,
)
from sdp_deepspeed.support.rows import Row
from tests.helpers.support_examples import HINTS, REFUSED, WORKS, ds_config, ids


def parsed(config: dict[str, Any]) -> SubnetworkConfig:
    block = parse(config)
    assert block is not None
    return block


def check(config: dict[str, Any]) -> None:
    refuse_unsupported(parsed(config), config)


@pytest.mark.parametrize("row", REFUSED, ids=ids(REFUSED))
def test_refused_by_name(row: Row) -> None:
    with pytest.raises(ValueError, match="not possible") as caught:
        check(ds_config(row, row.example))
    text = str(caught.value)
    assert text.startswith(f"{row.path}: got ")
    assert row.what in text
    assert "\n" not in text


@pytest.mark.parametrize("row", [*WORKS, *HINTS], ids=ids([*WORKS, *HINTS]))
def test_what_works_and_what_has_no_effect_is_not_refused(row: Row) -> None:
    check(ds_config(row, row.example))


@pytest.mark.parametrize("row", HINTS, ids=ids(HINTS))
def test_hints_without_effect_are_mentioned(row: Row) -> None:
    config = ds_config(row, row.example)
    notes = without_effect(parsed(config), config)
    assert len(notes) == (row.applies is not None)
    assert all(note.startswith(f"{row.path}: got {row.example!r}: ") and row.note in note for note in notes)
    config = ds_config(row, None)
    assert without_effect(parsed(config), config) == []


def test_all_modes_work() -> None:
    for regime in ("forward", "backward"):
        for strategy in ("block", "neuron", {"attention": "block", "mlp": "neuron"}, {"mlp": "neuron"}):
            check({KEY: {"coverage": 0.5, "regime": regime, "strategy": strategy}})
    check({KEY: {"coverage": 0.5, "dense_branch_scale": "coverage"}})
    check({KEY: {"coverage": 0.5, "dense_branch_scale": "none", "regime": "backward"}})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": True},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "overlap_comm": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": None, "zero_hpz_partition_size": 1}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}, "cpu_offload": False}},
        {"zero_optimization": {"stage": 2, "contiguous_gradients": True, "reduce_scatter": True}},
        {"zero_optimization": {"stage": 2, "allgather_partitions": True, "round_robin_gradients": "auto"}},
        {"fp16": {"enabled": False}, "bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
        {"fp16": {"enabled": True}, "zero_optimization": True, "data_types": {"grad_accum_dtype": "torch.float32"}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "expert_parallel": {"enabled": False}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"prescale_gradients": "auto", "gradient_predivide_factor": "auto", "optimizer": {"type": "auto"}},
        {"managed_gradient_accumulation": True, "compile": {"deepcompile": False}, "hybrid_engine": {}},
        {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"data_efficiency": {"enabled": False}, "torch_autocast": {"enabled": False}, "autotuning": {"enabled": False}},
        {"optimizer": {"type": "adamw", "params": {}}, "gradient_clipping": 1.0},
        {"checkpoint": {"load_universal": False, "writer": None}, "datastates_ckpt": False},
    ],
)
def test_defaults_spelled_out_are_neither_refused_nor_mentioned(config: dict[str, Any]) -> None:
    config = {KEY: {"coverage": 0.5}, **config}
    check(config)
    assert without_effect(parsed(config), config) == []


def test_old_spellings_are_read() -> None:
    config: dict[str, Any] = {KEY: {"coverage": 0.5}, "bfloat16": {"enabled": True}}
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    with pytest.raises(ValueError, match="stage 0"):
        check(config)
    check(config | {"zero_optimization": True})
    with pytest.raises(ValueError, match="optimizer in host memory, stage 0"):
        check({KEY: {"coverage": 0.5}, "zero_optimization": {"cpu_offload": True}})


def test_clipping_needs_the_norm() -> None:
    """DeepSpeed clips by 1 unless it is told otherwise."""
    config: dict[str, Any] = {KEY: {"coverage": 0.5}, "zero_optimization": {"stage": 1, "compute_grad_norm": False}}
    check(config | {"gradient_clipping": 0})
    with pytest.raises(ValueError, match="gradient_clipping must be 0"):
        check(config)


def test_all_refusals_in_one_message() -> None:
    with pytest.raises(ValueError, match="does not support 3 settings") as caught:
        check(
            {
                KEY: {"coverage": 0.5, "regime": "backward", "dense_branch_scale": "coverage"},
                "prescale_gradients": True,
                "zero_optimization": {"stage": 3, "reduce_scatter": False},
            }
        )
    assert len(str(caught.value).split("\n")) == 4


@pytest.mark.parametrize("name", ["LBFGS", "OneBitAdam", "MuAdam", "AdamX", "RMSprop"])
def test_unknown_optimizers_need_permission(name: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer '{name}' .* AdamW, .*{KEY}\.allow_optimizer to true"):
        refuse_optimizer(name, SubnetworkConfig(coverage=0.5))
    for allowed in (True, "whole_tensors"):
        refuse_optimizer(name, SubnetworkConfig(coverage=0.5, allow_optimizer=allowed))
        config = {KEY: {"coverage": 0.5, "allow_optimizer": allowed}, "optimizer": {"type": name}}
        check(config)


def test_a_class_is_named_with_where_it_is_from() -> None:
    with pytest.raises(ValueError, match=r"optimizer 'RMSprop' of torch\.optim\.rmsprop is not known"):
        refuse_optimizer(torch.optim.RMSprop, SubnetworkConfig(coverage=0.5))
    refuse_optimizer(torch.optim.Muon, SubnetworkConfig(coverage=0.5))


def test_modules_whose_gradients_cannot_travel_are_refused() -> None:
    class Experts(torch.nn.Module):
        __module__ = "deepspeed.moe.layer"

    refuse_modules(torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'0' \(Embedding\) makes sparse gradients"):
        refuse_modules(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ValueError, match=r"'1' is a mixture of experts"):
        refuse_modules(torch.nn.Sequential(torch.nn.Identity(), Experts()))


def _tied_by_data(model: Any) -> None:
    model[2].weight.data = model[0].weight.data


def _overlapping(model: Any) -> None:
    model[2].weight.data = model[0].weight.data.view(-1)[6:9].view(1, 3)


def _a_column(model: Any) -> None:
    model[2].weight.data = model[0].weight.data[:, 1:2]


def _one_is_frozen(model: Any) -> None:
    _tied_by_data(model)
    model[0].weight.requires_grad_(False)


def _behind_a_small_one(model: Any) -> None:
    """That lies between columns of the first, and ends before the third begins."""
    flat = torch.zeros(5, 3, device=model[0].weight.device)
    model[0].weight.data, model[0].bias.data = flat[:, :2], flat[0, 2:]
    model[2].weight.data = flat[3:]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tie", [_tied_by_data, _overlapping, _a_column, _one_is_frozen, _behind_a_small_one])
def test_parameters_in_the_same_memory_are_refused(tie: Any, device: str) -> None:
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    tie(model)
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' lie in the same memory.*Parameter itself"):
        refuse_shared_memory(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_nobody_trains_twice_is_not_refused(device: str) -> None:
    """One object, parts of one buffer beside or between each other, empty ones, and frozen ones."""
    with torch.device(device):
        model: Any = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(7)])
        model[1].weight = model[0].weight
        flat, rows = torch.zeros(18), torch.zeros(3, 6)
        model[2].weight.data, model[3].weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
        model[4].weight.data, model[5].weight.data = rows[:, ::2], rows[:, 1::2]
        model[0].bias.data = model[1].bias.data = torch.empty(0)
        model[6].bias.data = model[5].bias.data
        model[6].bias.requires_grad_(False)
        model[5].bias.requires_grad_(False)
    refuse_shared_memory(model)
    model[3].weight.data = flat[8:17].view(3, 3)  # one element of it is the other's, too
    with pytest.raises(ValueError, match=r"'2\.weight' and '3\.weight' lie in the same memory"):
        refuse_shared_memory(model)
