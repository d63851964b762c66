"""The questions that rows of the support table ask of a config.

Each gets the value at the row's path (None if absent or "auto") and the whole config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.optimizers import is_known
from sdp_deepspeed.support.rows import Condition, Tree, lookup

DEFAULT_CLIPPING = 1.0  # DeepSpeed's, for a config without `gradient_clipping`


def equals(*values: Any) -> Condition:
    """The value is one of these."""
    return lambda value, tree: value in values


def differs(*values: Any) -> Condition:
    """The value is there, and none of these."""
    return lambda value, tree: value is not None and value not in values


def is_on(value: Any, tree: Tree) -> bool:
    return bool(value)


def is_enabled(value: Any, tree: Tree) -> bool:
    """As DeepSpeed reads `{"enabled": true}`."""
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def is_present(value: Any, tree: Tree) -> bool:
    return value is not None


def is_above_one(value: Any, tree: Tree) -> bool:
    return isinstance(value, int) and value > 1


def has_device(*devices: str) -> Condition:
    """An offload to one of these."""
    return lambda value, tree: isinstance(value, Mapping) and value.get("device", "none") in devices


def at_stages(condition: Condition, *stages: int) -> Condition:
    """`condition`, at these ZeRO stages."""
    return lambda value, tree: (lookup(tree, "zero_optimization.stage") or 0) in stages and condition(value, tree)


def scales_backward_branches(value: Any, tree: Tree) -> bool:
    return value == "coverage" and lookup(tree, f"{KEY}.regime") == "backward"


def fetches_in_backward_regime(value: Any, tree: Tree) -> bool:
    return value not in (None, "auto") and lookup(tree, f"{KEY}.regime") == "backward"


def sums_in_fp32(value: Any, tree: Tree) -> bool:
    """Gradients of a model in another dtype."""
    return _dtype(value) == "fp32" and _model_dtype(tree) != "fp32"


def sums_in_third_dtype(value: Any, tree: Tree) -> bool:
    """Neither fp32 nor the model's."""
    return value is not None and _dtype(value) not in ("fp32", _model_dtype(tree))


def clips_without_norm(value: Any, tree: Tree) -> bool:
    clip = lookup(tree, "gradient_clipping")
    return value is False and (DEFAULT_CLIPPING if clip is None else clip) > 0


def overlaps_unmanaged(value: Any, tree: Tree) -> bool:
    """Overlap of communication where the caller, not the engine, ends a step."""
    return value is False and bool(lookup(tree, "zero_optimization.overlap_comm"))


def autocasts_below_bf16(value: Any, tree: Tree) -> bool:
    """Or in no dtype that it names: what torch takes then depends on the device."""
    return is_enabled(value, tree) and (not isinstance(value, Mapping) or _dtype(value.get("dtype")) != "bf16")


def is_unknown_optimizer(value: Any, tree: Tree) -> bool:
    """An optimizer outside the lists, without permission."""
    return value is not None and not lookup(tree, f"{KEY}.allow_optimizer") and not is_known(str(value))


def _model_dtype(tree: Tree) -> str:
    enabled = [name for name in ("fp16", "bf16") if is_enabled(lookup(tree, name), tree)]
    return enabled[0] if enabled else "fp32"


def _dtype(value: Any) -> str:
    name = str(value).lower().removeprefix("torch.")
    return {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(name, name)
