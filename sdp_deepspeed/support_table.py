"""The rows of the support table: what a config can ask for, where, and whether it works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sdp_deepspeed.config import KEY

State = Literal["works", "not built yet", "refused"]
Tree = Mapping[str, Any]
Asks = Callable[[Any, Tree], bool]

ELEMENTWISE_OPTIMIZERS = (
    "Adam",
    "AdamW",
    "FusedAdam",
    "DeepSpeedCPUAdam",
    "SGD",
    "Adagrad",
    "DeepSpeedCPUAdagrad",
    "Lion",
    "FusedLion",
    "DeepSpeedCPULion",
)


@dataclass(frozen=True)
class Row:
    """One thing that a config can ask for.

    Args:
        what: in words.
        path: JSON path in the DeepSpeed config; empty for what only the engine can see.
        state: whether it works.
        example: a value at `path` that asks for it.
        asks: whether the value at `path` (None if absent) asks for it, given the whole config.
        note: why it is refused, or what to do instead.
    """

    what: str
    path: str
    state: State
    example: Any = None
    asks: Asks | None = None
    note: str = ""


def lookup(tree: Tree, path: str) -> Any:
    """The value at a dotted JSON path, None if it is absent."""
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def is_elementwise(name: str) -> bool:
    """Whether an optimizer's name (DeepSpeed's `optimizer.type`, or a class name) is in the list."""
    return name.lower() in {known.lower() for known in ELEMENTWISE_OPTIMIZERS}


def _is(*values: Any) -> Asks:
    return lambda value, tree: value in values


def _is_on(value: Any, tree: Tree) -> bool:
    return bool(value)


def _is_enabled(value: Any, tree: Tree) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _is_present(value: Any, tree: Tree) -> bool:
    return value is not None


def _above_one(value: Any, tree: Tree) -> bool:
    return isinstance(value, int) and value > 1


def _has_device(value: Any, tree: Tree) -> bool:
    return isinstance(value, Mapping) and value.get("device", "none") not in (None, "none")


def _scaled_backward(value: Any, tree: Tree) -> bool:
    return value == "coverage" and lookup(tree, f"{KEY}.regime") == "backward"


def _model_dtype(tree: Tree) -> str:
    return "bf16" if _is_enabled(lookup(tree, "bf16"), tree) else "fp32"


def _fp32_sums_at_stage_0(value: Any, tree: Tree) -> bool:
    is_fp32 = _dtype(value) == "fp32"
    return is_fp32 and _model_dtype(tree) == "bf16" and not lookup(tree, "zero_optimization.stage")


def _other_sums(value: Any, tree: Tree) -> bool:
    return value is not None and _dtype(value) not in ("fp32", _model_dtype(tree))


def _dtype(value: Any) -> str:
    name = str(value).lower().removeprefix("torch.")
    return {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(name, name)


def _not_elementwise(value: Any, tree: Tree) -> bool:
    allowed = bool(lookup(tree, f"{KEY}.allow_optimizer"))
    return value is not None and not allowed and not is_elementwise(str(value))


_REDUCTION = "gradients are averaged over their holders by the exchange"
_REMOVED = "DeepSpeed has removed it; remove the key"

TABLE: tuple[Row, ...] = (
    Row("forward regime", f"{KEY}.regime", "works", "forward"),
    Row("backward regime", f"{KEY}.regime", "works", "backward"),
    Row("block strategy", f"{KEY}.strategy", "works", "block"),
    Row("neuron strategy", f"{KEY}.strategy", "works", "neuron"),
    Row("strategy by part", f"{KEY}.strategy", "works", {"attention": "neuron", "mlp": "block"}),
    Row("groups of neurons", f"{KEY}.neuron_groups", "works", 4),
    Row("scaled dense branches, forward regime", f"{KEY}.dense_branch_scale", "works", "coverage"),
    Row(
        "scaled dense branches, backward regime",
        f"{KEY}.dense_branch_scale",
        "refused",
        "coverage",
        _scaled_backward,
        "its workers train the whole model, which needs no scale; remove the key",
    ),
    Row("one subnetwork for each data-parallel rank", f"{KEY}.subnetworks", "works", "auto"),
    Row("replicas of subnetworks", f"{KEY}.subnetworks", "not built yet", 1, None, 'use "auto"'),
    Row("ZeRO stage 0", "zero_optimization.stage", "works", 0),
    Row("ZeRO stage 1", "zero_optimization.stage", "works", 1),
    Row("ZeRO stage 2", "zero_optimization.stage", "works", 2),
    Row(
        "ZeRO stage 3", "zero_optimization.stage", "refused", 3, _is(3), "it shards what subnetworks hold; use stage 1"
    ),
    Row("fp32", "", "works"),
    Row("bf16", "bf16.enabled", "works", True),
    Row("fp16", "fp16.enabled", "not built yet", True, _is_on, "use bf16"),
    Row("torch autocast", "torch_autocast.enabled", "not built yet", True, _is_on, "use bf16"),
    Row("fp32 gradient sums with bf16, stage 1", "data_types.grad_accum_dtype", "works", "fp32"),
    Row(
        "fp32 gradient sums with bf16, stage 0",
        "data_types.grad_accum_dtype",
        "refused",
        "fp32",
        _fp32_sums_at_stage_0,
        "DeepSpeed refuses this pair too; use stage 1",
    ),
    Row(
        "gradient sums below the weights' precision",
        "data_types.grad_accum_dtype",
        "refused",
        "fp16",
        _other_sums,
        "use fp32, or the dtype of the weights",
    ),
    Row("bf16 master weights", "bf16.bf16_master_weights_and_grads", "not built yet", True, _is_on),
    Row("bf16 optimizer state", "bf16.bf16_optimizer_states", "not built yet", True, _is_on),
    Row(
        "offload of optimizer state",
        "zero_optimization.offload_optimizer",
        "not built yet",
        {"device": "cpu"},
        _has_device,
    ),
    Row("offload of optimizer state (old key)", "zero_optimization.cpu_offload", "not built yet", True, _is_on),
    Row(
        "offload of parameters",
        "zero_optimization.offload_param",
        "refused",
        {"device": "cpu"},
        _has_device,
        "it needs stage 3",
    ),
    Row(
        "offload of parameters (old key)",
        "zero_optimization.cpu_offload_param",
        "refused",
        True,
        _is_on,
        "it needs stage 3",
    ),
    Row("overlap of communication", "zero_optimization.overlap_comm", "works", True),
    Row("ZenFlow", "zero_optimization.zenflow", "refused", {"topk_ratio": 0.1}, _is_present),
    Row("step without gradient norm", "zero_optimization.compute_grad_norm", "not built yet", False, _is(False)),
    Row("hierarchical partitions (ZeRO++)", "zero_optimization.zero_hpz_partition_size", "refused", 2, _above_one),
    Row("quantized weights (ZeRO++)", "zero_optimization.zero_quantized_weights", "refused", True, _is_on),
    Row(
        "quantized frozen weights (ZeRO++)",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "refused",
        True,
        _is_on,
    ),
    Row(
        "quantized gradients (ZeRO++)",
        "zero_optimization.zero_quantized_gradients",
        "refused",
        True,
        _is_on,
        _REDUCTION,
    ),
    Row("round-robin gradients", "zero_optimization.round_robin_gradients", "refused", True, _is_on, _REDUCTION),
    Row("prescaled gradients", "prescale_gradients", "refused", True, _is_on, _REDUCTION),
    Row(
        "predivided gradients", "gradient_predivide_factor", "refused", 2.0, lambda v, _: v not in (None, 1), _REDUCTION
    ),
    Row(
        "sum of gradients", "gradient_allreduce_op", "refused", "sum", lambda v, _: v not in (None, "mean"), _REDUCTION
    ),
    Row("gradient accumulation by the caller", "managed_gradient_accumulation", "not built yet", False, _is(False)),
    Row("tensor parallelism (AutoTP)", "tensor_parallel.autotp_size", "not built yet", 2, _above_one),
    Row("sequence parallelism", "sequence_parallel_size", "refused", 2, _above_one),
    Row("expert parallelism", "expert_parallel", "refused", {"enabled": True}, _is_enabled),
    Row("pipeline modules", "", "refused"),
    Row("hybrid engine", "hybrid_engine", "refused", {"enabled": True}, _is_enabled),
    Row("DeepCompile", "compile.deepcompile", "refused", True, _is_on),
    Row("data efficiency (curriculum, random-LTD)", "data_efficiency", "refused", {"enabled": True}, _is_enabled),
    Row("elementwise optimizers", "optimizer.type", "works", "AdamW"),
    Row(
        "other optimizers",
        "optimizer.type",
        "refused",
        "Lamb",
        _not_elementwise,
        f"each owner steps a flat part of a unit; use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}, or set "
        f"{KEY}.allow_optimizer if yours updates each element by itself",
    ),
    Row("Apex AMP", "amp", "refused", {"enabled": True}, _is_enabled, _REMOVED),
    Row("sparse gradients", "sparse_gradients", "refused", True, _is_on, _REMOVED),
    Row("elasticity", "elasticity", "refused", {"enabled": True}, _is_enabled, _REMOVED),
    Row("legacy curriculum learning", "curriculum_learning", "refused", {"enabled": True}, _is_enabled, _REMOVED),
)
