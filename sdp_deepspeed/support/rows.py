"""What a row of the support table is, and the questions that rows ask of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sdp_deepspeed.config import KEY

State = Literal["works", "no effect", "not built yet", "refused"]
Tree = Mapping[str, Any]
Asks = Callable[[Any, Tree], bool]

DEFAULT_CLIPPING = 1.0  # DeepSpeed's, for a config without `gradient_clipping`
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
        state: "works"; "no effect" for hints about how DeepSpeed's own reduction works, which change no result; else
            it is refused at start.
        example: a value at `path` that asks for it.
        asks: whether the value at `path` (None if absent or "auto") asks for it, given the whole config. None for what
            works, and for hints that need no mention at start.
        note: why it is refused or has no effect, or what to do instead.
    """

    what: str
    path: str
    state: State
    example: Any = None
    asks: Asks | None = None
    note: str = ""


def lookup(tree: Tree, path: str) -> Any:
    """The value at a dotted JSON path; None if it is absent or "auto", which DeepSpeed reads as absent."""
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return None if isinstance(value, str) and value == "auto" else value


def normalised(ds_config: Mapping[str, Any], block: Mapping[str, Any]) -> Tree:
    """The DeepSpeed config with one spelling for what DeepSpeed spells in two ways, and the block's defaults."""
    tree = {**ds_config, KEY: block}
    if tree.get("bf16") is None and "bfloat16" in tree:
        tree["bf16"] = tree["bfloat16"]
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        tree["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping) and zero.get("cpu_offload"):
        tree["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}, **zero}
    return tree


def is_elementwise(name: str) -> bool:
    """Whether an optimizer's name (DeepSpeed's `optimizer.type`, or a class name) is in the list."""
    return name.lower() in {known.lower() for known in ELEMENTWISE_OPTIMIZERS}


def equals(*values: Any) -> Asks:
    """The value is one of these."""
    return lambda value, tree: value in values


def differs(*values: Any) -> Asks:
    """The value is there, and none of these."""
    return lambda value, tree: value is not None and value not in values


def is_on(value: Any, tree: Tree) -> bool:
    return bool(value)


def is_enabled(value: Any, tree: Tree) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def is_present(value: Any, tree: Tree) -> bool:
    return value is not None


def above_one(value: Any, tree: Tree) -> bool:
    return isinstance(value, int) and value > 1


def has_device(*devices: str) -> Asks:
    return lambda value, tree: isinstance(value, Mapping) and value.get("device", "none") in devices


def with_stage(asks: Asks, *stages: int) -> Asks:
    """`asks`, at these ZeRO stages."""
    return lambda value, tree: (lookup(tree, "zero_optimization.stage") or 0) in stages and asks(value, tree)


def scaled_backward(value: Any, tree: Tree) -> bool:
    return value == "coverage" and lookup(tree, f"{KEY}.regime") == "backward"


def fp32_sums(value: Any, tree: Tree) -> bool:
    return _dtype(value) == "fp32" and _model_dtype(tree) != "fp32"


def other_sums(value: Any, tree: Tree) -> bool:
    return value is not None and _dtype(value) not in ("fp32", _model_dtype(tree))


def clips(value: Any, tree: Tree) -> bool:
    """No norm, and clipping by it."""
    clip = lookup(tree, "gradient_clipping")
    return value is False and (DEFAULT_CLIPPING if clip is None else clip) > 0


def overlaps(value: Any, tree: Tree) -> bool:
    return value is False and bool(lookup(tree, "zero_optimization.overlap_comm"))


def autocasts_below_bf16(value: Any, tree: Tree) -> bool:
    """Or in no dtype that it names: what torch takes then depends on the device."""
    return is_enabled(value, tree) and (not isinstance(value, Mapping) or _dtype(value.get("dtype")) != "bf16")


def not_elementwise(value: Any, tree: Tree) -> bool:
    allowed = bool(lookup(tree, f"{KEY}.allow_optimizer"))
    return value is not None and not allowed and not is_elementwise(str(value))


def _model_dtype(tree: Tree) -> str:
    enabled = [name for name in ("fp16", "bf16") if is_enabled(lookup(tree, name), tree)]
    return enabled[0] if enabled else "fp32"


def _dtype(value: Any) -> str:
    name = str(value).lower().removeprefix("torch.")
    return {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(name, name)
