"""The rows of the support table: complete, consistent, and about keys that DeepSpeed knows."""

from __future__ import annotations

import importlib

import pytest

from sdp_deepspeed.support.rows import Row
from sdp_deepspeed.support.table import TABLE
from tests.helpers.support_examples import HINTS, WORKS, ids

# Where DeepSpeed 0.19.8 declares the keys below; keys that it reads with a string literal are left out.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
}

# What the method promises: a refusal in its place would satisfy the tests above too.
PROMISED = {
    *(
        "forward regime",
        "backward regime",
        "block strategy",
        "neuron strategy",
        "strategy by part",
        "groups of neurons",
    ),
    *("dense model in evaluation: resident, prefetched, streamed",),
    *("scaled dense branches, forward regime", "replicas of subnetworks"),
    *("optimizers of single elements", "optimizers of whole tensors: Muon, Adafactor, Lamb"),
    *("ZeRO stage 0", "ZeRO stage 1", "ZeRO stage 2", "overlap of communication"),
    *("size of gradient buckets", "size of weight buckets", "dtype of gradients on the wire"),
    *("fp32", "bf16", "fp16, dynamic loss scale", "fp16, static loss scale", "fp32 gradient sums, stages 1 and 2"),
    *("optimizer in host memory, stages 1 and 2", "tensor parallelism (AutoTP)"),
    *("gradient accumulation by the engine", "gradient accumulation by the caller"),
}


def test_what_is_promised_works() -> None:
    assert {row.what for row in WORKS} >= PROMISED


def test_states_fit() -> None:
    assert all(row.applies is None for row in WORKS)
    assert all(row.applies is not None for row in TABLE if row.path and row.state == "refused")
    assert all(row.note for row in HINTS)
    assert len({row.what for row in TABLE}) == len(TABLE)


DECLARED = [row for row in TABLE if "." in row.path and row.path.split(".")[0] in MODELS]


@pytest.mark.parametrize("row", DECLARED, ids=ids(DECLARED))
def test_deepspeed_knows_the_key(row: Row) -> None:
    """A key that DeepSpeed renames would no longer be refused."""
    first, name, *_ = row.path.split(".")
    module_name, class_name = MODELS[first]
    pytest.importorskip("deepspeed")
    fields = getattr(importlib.import_module(module_name), class_name).model_fields
    assert name in fields or name in {field.alias for field in fields.values()}


# Keys that DeepSpeed's stages 0 to 2 do not read, and what needs no row: read before us, the same for any optimizer.
NOT_OURS = {
    *("cpu_offload_use_pin_memory", "sub_group_size", "prefetch_bucket_size", "param_persistence_threshold"),
    *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
    *("gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params"),
    *("allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "memory_efficient_linear"),
    *("pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("save_muon_momentum_buffer_in_memory", "leaf_module", "auto_cast", "initial_scale_power"),
    *("loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
}


@pytest.mark.parametrize("first", ["zero_optimization", "bf16", "fp16"])
def test_every_key_of_deepspeed_has_a_row(first: str) -> None:
    """A key that a new version brings must be read and decided on."""
    pytest.importorskip("deepspeed")
    module_name, class_name = MODELS[first]
    fields = set(getattr(importlib.import_module(module_name), class_name).model_fields)
    assert fields - {row.path.split(".")[1] for row in TABLE if row.path.startswith(f"{first}.")} <= NOT_OURS
