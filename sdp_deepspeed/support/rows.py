"""What a row of the support table is, and how the table sees a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sdp_deepspeed.config import KEY

State = Literal["works", "no effect", "untested", "refused"]
Tree = Mapping[str, Any]
Condition = Callable[[Any, Tree], bool]


@dataclass(frozen=True)
class Row:
    """One thing that a config (of FSDP2: a block, or an argument of `fully_shard`) can ask for.

    Args:
        what: in words.
        path: JSON path in the DeepSpeed config, or FSDP2's argument; empty for what only the host can see.
        state: "works"; "no effect" for hints about how DeepSpeed's own reduction works, which change no result;
            "untested" for what nobody has tried and nothing refuses; else it is refused at start.
        example: a value at `path` that asks for it.
        applies: whether the value at `path` (None if absent or "auto") asks for it, given the whole config. None for
            what works, and for hints that need no mention at start.
        note: why it is refused or has no effect, or what to do instead.
    """

    what: str
    path: str
    state: State
    example: Any = None
    applies: Condition | None = None
    note: str = ""


def lookup(tree: Tree, path: str) -> Any:
    """The value at a dotted JSON path; None if it is absent or "auto", which DeepSpeed reads as absent."""
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return None if isinstance(value, str) and value == "auto" else value


def normalized(ds_config: Mapping[str, Any], block: Mapping[str, Any]) -> Tree:
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


def works(what: str, path: str, example: Any = None) -> Row:
    return Row(what, path, "works", example)


def refused(what: str, path: str, example: Any, applies: Condition, note: str = "") -> Row:
    return Row(what, path, "refused", example, applies, note)


def hint(what: str, path: str, example: Any, applies: Condition | None, note: str) -> Row:
    return Row(what, path, "no effect", example, applies, note)
