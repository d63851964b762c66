"""Markdown tables from the raw JSON under benchmarks/results: `python benchmarks/table.py [file ...]`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def step_time(result: dict[str, Any]) -> str:
    """Median and quartiles of step times, and of the ratios to the baseline of the same repeat."""
    baseline = result["seconds"][result["baseline"]]
    arguments = result["arguments"]
    lines = [
        f"{result['ranks']} ranks, {result['model']['num_parameters'] / 1e6:.2f}M parameters, batch "
        f"{arguments['micro_batch']} x {result['sequence_length']} per rank, accumulation {arguments['accumulation']}, "
        f"{len(baseline)} repeats",
        "",
        "| | step (ms) | quartiles | ratio to baseline | quartiles |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        low, middle, high = quartiles([1e3 * value for value in seconds])
        ratio_low, ratio, ratio_high = quartiles([a / b for a, b in zip(seconds, baseline, strict=True)])
        lines.append(
            f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {ratio:.3f} | {ratio_low:.3f} to {ratio_high:.3f} |"
        )
    return "\n".join(lines)


MAKERS = {"step_time": step_time}


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        print(f"### {path.name}\n\n{MAKERS[result['what']](result)}\n")


if __name__ == "__main__":
    main()
