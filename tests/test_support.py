"""The support table: every row that does not work is refused by name, and nothing else is."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, Layout, SubnetworkConfig, parse
from sdp_deepspeed.support import is_elementwise, markdown, optimizer_refusal, refuse_unsupported
from sdp_deepspeed.support_table import ELEMENTWISE_OPTIMIZERS, TABLE, Row

REFUSED = [row for row in TABLE if row.asks is not None]
WORKS = [row for row in TABLE if row.state == "works"]
# Where DeepSpeed 0.19.8 declares the keys below; keys that it reads with a string literal are left out.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
}
# What a row's setting needs beside it to have an effect.
BESIDE = {
    "groups of neurons": {"strategy": "neuron"},
    "scaled dense branches, backward regime": {"regime": "backward"},
}


def ds_config(row: Row, value: Any) -> dict[str, Any]:
    """A config with bf16, stage 1, `value` at the row's path, and what it needs beside it."""
    stage = 0 if "stage 0" in row.what else 1
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        KEY: {"coverage": 0.5, **BESIDE.get(row.what, {})},
    }
    if row.path:
        *parents, last = row.path.split(".")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


def check(config: dict[str, Any], layout: Layout | None = None) -> None:
    parsed = parse(config)
    assert parsed is not None
    refuse_unsupported(parsed, config, layout)


def ids(rows: list[Row]) -> list[str]:
    return [row.what for row in rows]


@pytest.mark.parametrize("row", REFUSED, ids=ids(REFUSED))
def test_refused_by_name(row: Row) -> None:
    with pytest.raises(ValueError, match=r"not built yet|not possible") as caught:
        check(ds_config(row, row.example))
    text = str(caught.value)
    assert text.startswith(f"{row.path}: got ")
    assert row.what in text
    assert "\n" not in text


@pytest.mark.parametrize("row", WORKS, ids=ids(WORKS))
def test_what_works_is_not_refused(row: Row) -> None:
    check(ds_config(row, row.example))


def test_all_corners_work() -> None:
    for regime in ("forward", "backward"):
        for strategy in ("block", "neuron", {"attention": "block", "mlp": "neuron"}, {"mlp": "neuron"}):
            check({KEY: {"coverage": 0.5, "regime": regime, "strategy": strategy}})
    check({KEY: {"coverage": 0.5, "dense_branch_scale": "coverage"}})
    check({KEY: {"coverage": 0.5, "dense_branch_scale": "none", "regime": "backward"}})
    corners = ("forward regime", "backward regime", "block strategy", "neuron strategy", "strategy by part")
    assert {row.what for row in WORKS} >= {*corners, "groups of neurons", "scaled dense branches, forward regime"}


def test_states_fit() -> None:
    assert all(row.state == "works" for row in TABLE if not row.asks and row.path != f"{KEY}.subnetworks" and row.path)
    assert all(row.state != "works" for row in REFUSED)
    assert len({row.what for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": True},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "overlap_comm": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": None, "zero_hpz_partition_size": 1}},
        {"fp16": {"enabled": False}, "bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "expert_parallel": {"enabled": False}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"managed_gradient_accumulation": True, "compile": {"deepcompile": False}, "hybrid_engine": {}},
        {"data_efficiency": {"enabled": False}, "torch_autocast": {"enabled": False}},
        {"optimizer": {"type": "adamw", "params": {}}, "gradient_clipping": 1.0},
    ],
)
def test_defaults_spelt_out_are_not_refused(config: dict[str, Any]) -> None:
    check({KEY: {"coverage": 0.5}, **config})


def test_old_spelling_of_bf16_is_read() -> None:
    config = {"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(ValueError, match="stage 0"):
        check({KEY: {"coverage": 0.5}, **config})
    check({KEY: {"coverage": 0.5}, "zero_optimization": {"stage": 1}, **config})


def test_all_refusals_in_one_message() -> None:
    with pytest.raises(ValueError, match="does not support 3 settings") as caught:
        check(
            {
                KEY: {"coverage": 0.5, "regime": "backward", "dense_branch_scale": "coverage"},
                "fp16": {"enabled": True},
                "zero_optimization": {"stage": 3},
            }
        )
    assert len(str(caught.value).split("\n")) == 4


def test_replicas() -> None:
    check({KEY: {"holders": 1}}, Layout(2, 1, 1))
    with pytest.raises(ValueError, match="replicas of subnetworks are not built yet"):
        check({KEY: {"holders": 1}}, Layout(2, 1, 2))


@pytest.mark.parametrize("name", [*ELEMENTWISE_OPTIMIZERS, "adam", "adamw", "lion", "adagrad", "sgd"])
def test_elementwise_optimizers(name: str) -> None:
    assert is_elementwise(name)
    optimizer_refusal(name, SubnetworkConfig(coverage=0.5))


@pytest.mark.parametrize("name", ["Lamb", "FusedLamb", "Muon", "LBFGS", "Adafactor", "OneBitAdam", "MuAdam", "AdamX"])
def test_other_optimizers_need_permission(name: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer '{name}' .* AdamW, .*{KEY}\.allow_optimizer to true"):
        optimizer_refusal(name, SubnetworkConfig(coverage=0.5))
    optimizer_refusal(name, SubnetworkConfig(coverage=0.5, allow_optimizer=True))
    config = {KEY: {"coverage": 0.5, "allow_optimizer": True}, "optimizer": {"type": name}}
    check(config)


DECLARED = [row for row in REFUSED if "." in row.path and row.path.split(".")[0] in MODELS]


@pytest.mark.parametrize("row", DECLARED, ids=ids(DECLARED))
def test_deepspeed_knows_the_key(row: Row) -> None:
    """A key that DeepSpeed renames would no longer be refused."""
    first, name = row.path.split(".")
    module_name, class_name = MODELS[first]
    pytest.importorskip("deepspeed")
    fields = getattr(importlib.import_module(module_name), class_name).model_fields
    assert name in fields or name in {field.alias for field in fields.values()}


def test_matrix_lists_all_rows() -> None:
    lines = markdown().split("\n")
    assert len([line for line in lines if line.startswith("|")]) == len(TABLE) + 2
    assert f"{len(WORKS)} of {len(TABLE)} rows work" in lines[-1]
