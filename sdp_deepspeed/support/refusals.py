"""What works together with subnetwork data parallelism: one table (support_table.py), three uses.

Start-up refuses from it before any group is made, README's support matrix is made of it
(`python -m sdp_deepspeed.support README.md`), tests iterate over it and over its cells (support_cells.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.cells import AXES, share
from sdp_deepspeed.support.rows import ELEMENTWISE_OPTIMIZERS, Row, is_elementwise
from sdp_deepspeed.support.table import TABLE, asked_for


def refuse_unsupported(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> None:
    """Refuse, by name, what is not supported together with the block.

    Args:
        config: the parsed block.
        ds_config: the whole DeepSpeed config, loaded.

    Raises:
        ValueError: all unsupported things, each with its JSON path.
    """
    lines = [_refusal(row, value) for row, value in asked_for(config, ds_config) if row.state != "no effect"]
    if len(lines) == 1:
        raise ValueError(lines[0])
    if lines:
        raise ValueError(f"{KEY} does not support {len(lines)} settings:\n" + "\n".join(f"  {line}" for line in lines))


def without_effect(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> list[str]:
    """Notes about hints to DeepSpeed's own reduction that differ from its defaults and have no effect here."""
    return [
        f"{row.path}: got {value!r}: {row.what}: no effect with {KEY}; {row.note}"
        for row, value in asked_for(config, ds_config)
        if row.state == "no effect"
    ]


def refuse_modules(model: Any) -> None:
    """Refuse a module whose gradients the exchange could not carry; no config says that a model has one.

    Raises:
        ValueError: by the module's name.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{KEY}: {name!r} ({type(module).__name__}) makes sparse gradients, which is not possible with {KEY}; "
                "build it with sparse=False"
            )
        if "deepspeed.moe.layer" in {base.__module__ for base in type(module).__mro__}:
            raise ValueError(
                f"{KEY}: {name!r} is a mixture of experts of DeepSpeed's, whose expert parallelism is not possible here"
            )


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
    """The support matrix for the README: rows, axes, and what is refused of their combinations."""
    rows = [(row.what, f"`{row.path}`" if row.path else "", row.state, row.note) for row in TABLE]
    works, hints = (sum(row.state == state for row in TABLE) for state in ("works", "no effect"))
    counted = share()
    words = " x ".join(name.replace("_", " ") for name in AXES)
    axes = [(name.replace("_", " "), ", ".join(_word(value) for value in values)) for name, values in AXES.items()]
    refused = [(row.what, f"{count:,}", row.note) for row, count in counted.refused_by]
    return "\n".join(
        [
            *_table(("what", "JSON path", "state", "why, or what to do"), rows),
            f"\n{works} of {len(TABLE)} rows work, {hints} are hints without effect; every other is refused at start.",
            f"\n{counted.num_allowed:,} of {counted.num_cells:,} cells ({words}) are allowed "
            f"({counted.num_allowed / counted.num_cells:.0%}):\n",
            *_table(("axis", "values"), axes),
            "\nThe others are refused by these rows, some by several:\n",
            *_table(("what", "cells", "why, or what to do"), refused),
        ]
    )


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def main(arguments: Sequence[str]) -> None:
    """Print the matrix, or write it between the markers of the file that is named."""
    if not arguments:
        print(markdown())
        return
    path = Path(arguments[0])
    before, after = re.split(r"(?<=<!-- matrix -->\n).*?(?=\n<!-- /matrix -->)", path.read_text(), flags=re.DOTALL)
    path.write_text(before + markdown() + after)
