"""What works together with subnetwork data parallelism: one table (support_table.py), three uses.

Start-up refuses from it before any group is made, README's support matrix is printed from it
(`python -m sdp_deepspeed.support`), tests iterate over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, Layout, SubnetworkConfig
from sdp_deepspeed.support_table import ELEMENTWISE_OPTIMIZERS, TABLE, Row, Tree, is_elementwise, lookup


def refuse_unsupported(config: SubnetworkConfig, ds_config: Mapping[str, Any], layout: Layout | None = None) -> None:
    """Refuse, by name, what is not supported together with the block.

    Args:
        config: the parsed block.
        ds_config: the whole DeepSpeed config, loaded.
        layout: counts from `resolve`, None before they are known.

    Raises:
        ValueError: all unsupported things, each with its JSON path.
    """
    tree = _tree(config, ds_config)
    lines = [
        _refusal(row, lookup(tree, row.path)) for row in TABLE if row.asks and row.asks(lookup(tree, row.path), tree)
    ]
    if layout is not None and layout.num_replicas > 1:
        lines.append(f"{KEY}.subnetworks: replicas of subnetworks are not built yet; use one for each rank")
    if len(lines) == 1:
        raise ValueError(lines[0])
    if lines:
        raise ValueError(f"{KEY} does not support {len(lines)} settings:\n" + "\n".join(f"  {line}" for line in lines))


def _tree(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> Tree:
    """The DeepSpeed config with one spelling for what DeepSpeed spells in two ways, and the block's defaults."""
    tree = {**ds_config, KEY: config.model_dump()}
    if tree.get("bf16") is None and "bfloat16" in tree:
        tree["bf16"] = tree["bfloat16"]
    if isinstance(tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}
    return tree


def _refusal(row: Row, value: Any) -> str:
    state = "is not built yet" if row.state == "not built yet" else f"is not possible with {KEY}"
    note = f"; {row.note}" if row.note else ""
    return f"{row.path}: got {value!r}: {row.what} {state}{note}"


def optimizer_refusal(name: str, config: SubnetworkConfig) -> None:
    """Refuse an optimizer that is not known to be elementwise.

    Args:
        name: DeepSpeed's `optimizer.type`, or the class name of a client optimizer.
        config: the block.

    Raises:
        ValueError: it is outside the list, and `allow_optimizer` is not set.
    """
    if not config.allow_optimizer and not is_elementwise(name):
        raise ValueError(
            f"optimizer {name!r} is not known to update each element by itself, and each owner steps a flat part of a "
            f"unit; use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}, or set {KEY}.allow_optimizer to true if yours does"
        )


def markdown() -> str:
    """The support matrix for the README."""
    lines = ["| what | JSON path | state |", "|---|---|---|"]
    for row in TABLE:
        lines.append(f"| {row.what} | {f'`{row.path}`' if row.path else ''} | {row.state} |")
    works = sum(row.state == "works" for row in TABLE)
    lines.append(f"\n{works} of {len(TABLE)} rows work; every other is refused at start.")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
