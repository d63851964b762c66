"""Set two runs of quickstart.py side by side.

python benchmarks/quickstart_table.py runs/quickstart runs/quickstart_zero1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(subject: Path, plain: Path) -> str:
    """What a worker holds, computes and sends in each phase and in the whole run, beside the plain run."""
    columns: dict[str, list[str]] = {"": ["steps", "model state", "peak memory", "TFLOPs", "sent", "dense loss"]}
    for folder in (subject, plain):
        phases = [*json.loads((folder / "measured.json").read_text()).values()]
        loss = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
        if len(phases) > 1:
            columns |= {f"phase {number}": _column([one], "") for number, one in enumerate(phases, 1)}
        columns[folder.name] = _column(phases, f"{loss:.3f}")
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    rows = [[*columns], *map(list, zip(*columns.values(), strict=True))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _column(phases: list[dict[str, int]], loss: str) -> list[str]:
    total = {name: sum(one["steps"] * one[name] for one in phases) for name in ("flops", "sent")}
    state, peak = (max(one[name] for one in phases) / 2**20 for name in ("state", "peak"))
    steps = sum(one["steps"] for one in phases)
    return [
        f"{steps}",
        f"{state:.1f} MiB",
        f"{peak:.1f} MiB",
        f"{total['flops'] / 1e12:.2f}",
        f"{total['sent'] / 1e6:.0f} MB",
        loss,
    ]


if __name__ == "__main__":
    print(table(*map(Path, sys.argv[1:])))
