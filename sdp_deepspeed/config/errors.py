"""Errors in a config: misspelt names of the block, and its problems, one line for each that pydantic reports."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sdp_deepspeed.messages import KEY, did_you_mean
from sdp_deepspeed.plan.coverage import RULES

Models = Mapping[str | int, type[BaseModel]]

# Other names that users may try. Misspellings of KEY are found by difflib.
_OTHER_NAMES = frozenset(
    {"sdp", "sdpconfig", "subnetwork", "subnetworks", "subnetworkparallel", "subnetworkparallelism", "sdpdeepspeed"}
)
_NEAR_MISS_RATIO = 0.8  # every top-level key of DeepSpeed stays below 0.7 (tests/unit/test_config.py)


def refuse_near_misses(ds_config: Mapping[str, Any]) -> None:
    """Raise ValueError if a top-level key resembles the block's name."""
    target = _normalized(KEY)
    for name in ds_config:
        if name == KEY or not isinstance(name, str):
            continue
        plain = _normalized(name)
        if plain in _OTHER_NAMES or difflib.get_close_matches(target, [plain], cutoff=_NEAR_MISS_RATIO):
            raise ValueError(
                f"unknown top-level key {name!r}: DeepSpeed would ignore it and train without subnetworks; write "
                f"{KEY!r}, or rename the key"
            )


def _normalized(name: str) -> str:
    """Lower case, without hyphens and underscores."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def explain(error: ValidationError, block: Mapping[str, Any], root: str, models: Models) -> str:
    """Describe all problems of a block, one line each.

    Args:
        models: the block's model at "", and models of nested objects by key. The title of a field says what is
            expected.
    """
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        keys = _keys(item["loc"], block)
        path = root + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
        # A union reports each alternative; the first message per key suffices.
        fields = models["" if len(keys) == 1 else keys[0]].model_fields if keys else {}
        problems.setdefault(path, _explain_one(path, keys, item, fields, block))
    lines = [line for text in problems.values() for line in text.split("\n")]
    if len(lines) == 1:
        return lines[0]
    return f"{root}: {len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)


def _keys(location: Sequence[int | str], block: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Keys of the block that lead to a problem; more than one inside nested objects."""
    if location[1:2] == (RULES,):
        is_alone = isinstance(block[str(location[0])], Mapping)
        return (location[0], *location[3 if is_alone else 2 : 4])
    return tuple(map(str, location[: 2 if location[:1] in (("checkpoint",), ("local_steps",)) else 1]))


def _explain_one(
    path: str, keys: Sequence[int | str], item: ErrorDetails, fields: Mapping[str, FieldInfo], block: Mapping[str, Any]
) -> str:
    kind = item["type"]
    message = item["msg"].removeprefix("Value error, ")
    if not keys:
        return message
    name = str(keys[-1])
    if isinstance(keys[-1], int):
        one = f'{{"{keys[0]}": ...}} or {{"profile": "linear", "first": ..., "last": ...}}, with "units" to match names'
        return f"{path}: got {block[str(keys[0])][keys[-1]]!r}, expected an object such as {one}"
    if kind == "extra_forbidden":
        return f"{path}: unknown key; {did_you_mean(_normalized(name), fields, cutoff=0.5)}"
    if kind == "invalid_key":
        return f"{path}: keys must be strings"
    if kind == "missing":
        return f"{path}: missing, expected {fields[name].title}"
    value: Any = reduce(getitem, keys, block)  # type: ignore[arg-type]  # lists have integer keys
    if value == "auto":
        where = "is only possible for subnetworks, assignment and total_steps"
        return f'{path}: "auto" {where}; expected {fields[name].title}'
    detail = f" ({message})" if kind == "value_error" and name in ("shared", "local_steps") else ""
    return f"{path}: got {value!r}, expected {fields[name].title}{detail}"
