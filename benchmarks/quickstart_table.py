"""Set two runs of quickstart.py side by side.

python benchmarks/quickstart_table.py runs/quickstart runs/quickstart_zero1
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs=2, help="of the run with SDP, and of the plain one")
    options = parser.parse_args()
    print(table({folder.name: read(folder) for folder in options.folders}))


def read(folder: Path) -> dict[str, Any]:
    """Figures of each phase in order, and the final dense loss."""
    measured = json.loads((folder / "measured.json").read_text())
    loss = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
    phases = [measured["phases"][number] for number in sorted(measured["phases"], key=int)]
    return {"phases": phases, "loss": loss}


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """What a worker holds, computes and sends in each phase and in the whole run, beside the plain run."""
    columns: dict[str, list[str]] = {"": ["steps", "model state", "peak memory", "TFLOPs", "sent", "dense loss"]}
    for name, run in runs.items():
        if len(run["phases"]) > 1:
            columns |= {f"phase {number}": _column([one], "") for number, one in enumerate(run["phases"], 1)}
        columns[name] = _column(run["phases"], f"{run['loss']:.3f}")
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    rows = [[*columns], *map(list, zip(*columns.values(), strict=True))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _column(phases: Sequence[Mapping[str, int]], loss: str) -> list[str]:
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
    main()
