"""Of which type the keys of DeepSpeed's config must be that we read, and that DeepSpeed takes as they are.

DeepSpeed checks and converts what is inside `zero_optimization`, `fp16` and `bf16`, and refuses keys that it has given
up (`amp`, `sparse_gradients`). A wrong value elsewhere is a TypeError at some later point, or is taken for another:
`"false"` is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

_ABSENT = object()


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


Expectation = tuple[Callable[[Any], bool], str]
_OBJECT: Expectation = (_is_object, "an object {...}")
_OPTIONAL_OBJECT: Expectation = (lambda value: value is None or _is_object(value), "an object {...}")
_FLAG: Expectation = (_is_flag, "true or false")
_NAME: Expectation = (lambda value: isinstance(value, str), "a name")
_COUNT: Expectation = (
    lambda value: value is None or (_is_whole(value) and value >= 1),
    "a whole number of at least 1",
)

_EXPECTED: dict[str, Expectation] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": (lambda value: _is_whole(value) and value >= 1, _COUNT[1]),
    "managed_gradient_accumulation": _FLAG,
    "gradient_clipping": (lambda value: _is_number(value) and value >= 0, "a number of at least 0 (0 does not clip)"),
    "communication_data_type": (
        lambda value: value is None or (isinstance(value, str) and value.lower() in ("fp32", "fp16", "bf16")),
        '"fp32", "fp16" or "bf16"',
    ),
    "prescale_gradients": _FLAG,
    "gradient_predivide_factor": (_is_number, "a number"),
    "zero_optimization": (lambda value: _is_object(value) or _is_flag(value), _OBJECT[1]),
    "fp16": _OBJECT,
    "bf16": _OPTIONAL_OBJECT,
    "bfloat16": _OPTIONAL_OBJECT,
    "torch_autocast": _OBJECT,
    "torch_autocast.enabled": _FLAG,
    "data_types": _OBJECT,
    "optimizer": _OBJECT,
    "optimizer.type": _NAME,
    "optimizer.params": _OPTIONAL_OBJECT,
    "scheduler": _OBJECT,
    "scheduler.type": _NAME,
    "scheduler.params": _OBJECT,
    "tensor_parallel": _OBJECT,
    "checkpoint": _OBJECT,
    "checkpoint.load_universal": _FLAG,
    "activation_checkpointing": _OBJECT,
    "flops_profiler": _OBJECT,
    "comms_logger": _OBJECT,
    "compile": _OBJECT,
    "data_efficiency": _OBJECT,
    "hybrid_engine": _OBJECT,
    "autotuning": _OBJECT,
    "pipeline": _OBJECT,
}

_PARAMS = ("optimizer.params.", "scheduler.params.")


def refuse_wrong_types(ds_config: Mapping[str, Any]) -> None:
    """Refuse values that DeepSpeed would take for something else, or fail on without naming the key.

    Args:
        ds_config: the whole DeepSpeed config, loaded.

    Raises:
        ValueError: all of them, each with its JSON path.
    """
    try:
        leaves = list(_leaves(ds_config, ""))
    except RecursionError:
        raise ValueError("DeepSpeed config: nested too deeply, or a value contains itself") from None
    lines = []
    for path, (is_right, expected) in _EXPECTED.items():
        value = _at(ds_config, path)
        if value is not _ABSENT and not is_right(value):
            hint = '; nobody fills in "auto" here' if value == "auto" else ""
            lines.append(f"{path}: got {value!r}, expected {expected}{hint}")
    lines += [f"{path}: got {value!r}, {why}" for path, value in leaves if (why := _mistaken(path, value))]
    strange = [key for key in ds_config if not isinstance(key, str)]
    lines += [f"{key!r}: a key of the config must be text" for key in strange]
    if len(lines) == 1:
        raise ValueError(f"DeepSpeed config: {lines[0]}")
    if lines:
        raise ValueError(f"DeepSpeed config: {len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines))


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def _mistaken(path: str, value: Any) -> str:
    """What is wrong with a value anywhere in the config; empty if nothing is."""
    if not isinstance(value, str | int | float | None):
        return f"{type(value).__name__} is no JSON, in which DeepSpeed logs its config: give a plain number or text"
    if path.startswith(_PARAMS) and isinstance(value, str) and _reads_as_number_or_flag(value):
        return "text is taken as it is, also where a number or a flag is meant: write it without quotes"
    return ""


def _reads_as_number_or_flag(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree
