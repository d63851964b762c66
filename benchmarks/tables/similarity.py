"""Markdown tables of how similar the averaged gradients are to the dense one."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Result, coverage, table

MODE_KEY = "corner"  # of a record's mode, by its first name: results do not change


def by_layer(result: Result, step: int, mode: str) -> dict[str, list[float]]:
    """Cosine similarities of every draw, by layer in model order."""
    records = [record for record in result["records"] if (record["step"], record[MODE_KEY]) == (step, mode)]
    return {layer: [record["layers"][layer] for record in records] for layer in records[0]["layers"]}


def similarity(result: Result) -> str:
    """Median cosine similarity by layer and mode; T / V of the backward regime beside what theory permits."""
    plans, arguments = result["plans"], result["arguments"]
    items = "images" if "image_size" in result.get("data", {}) else "sequences"
    caption = (
        f"{arguments['ranks']} workers, {coverage(arguments['coverage'])}, "
        f"{result['model']['num_parameters'] / 1e6:.2f}M parameters, {arguments['batch']} {items} per worker; "
        f"median of {arguments['draws']} draws:"
    )
    tables = []
    for step in sorted({record["step"] for record in result["records"]}):
        columns = [by_layer(result, step, mode) for mode in plans]
        rows = [[layer, *(f"{statistics.median(draws[layer]):.4f}" for draws in columns)] for layer in columns[0]]
        tables.append(table([f"after {step} dense steps", *plans], rows))
    return "\n\n".join([caption, *tables, _distances(result)])


def _distances(result: Result) -> str:
    """T / V of the backward regime."""
    rows = []
    for mode, facts in result["plans"].items():
        if bound := facts.get("permitted"):
            ratios = [r["distance"] / r["deviation"] for r in result["records"] if r[MODE_KEY] == mode]
            cells = [f"{facts['spectral_gap']:.3f}", f"{statistics.mean(ratios):.4f}"]
            cells += [f"{min(ratios):.4f}, {max(ratios):.4f}"]
            rows.append([mode, *cells, *(f"{bound[kind]:.4f}" for kind in ("expected", "on_average", "always"))])
    heads = ("spectral gap", "T / V, mean", "lowest, highest", "expected", "permitted on average", "always")
    return table(["", *heads], rows)
