"""Set two runs of quickstart.py side by side.

python benchmarks/quickstart_table.py runs/quickstart runs/quickstart_zero1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def main() -> None:
    print(table({Path(folder).name: read(Path(folder)) for folder in sys.argv[1:]}))


def read(folder: Path) -> list[str]:
    """The column of a run: what its busiest worker holds, and computes and sends in the whole run."""
    measured = json.loads((folder / "measured.json").read_text())
    loss = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
    flops, sent = (measured["steps"] * measured[name] for name in ("flops", "sent"))
    held = [f"{measured[name] / 2**20:.1f} MiB" for name in ("state", "peak")]
    return [f"{measured['steps']}", *held, f"{flops / 1e12:.2f}", f"{sent / 1e6:.0f} MB", f"{loss:.3f}"]


def table(runs: Mapping[str, Sequence[str]]) -> str:
    """Columns side by side."""
    columns = {"": ["steps", "model state", "peak memory", "TFLOPs", "sent", "dense loss"], **runs}
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    rows = [[*columns], *zip(*columns.values(), strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    main()
