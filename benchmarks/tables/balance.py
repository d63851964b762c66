"""Markdown table of how evenly plans of vision models divide FLOPs."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.markdown import Result, coverage, table

_HEADS = ("units", "FLOPs max/mean", "best possible", "with what is shared", "by weights alone", "bytes (at least)")


def balance(result: Result) -> str:
    """A row for each plan; where several numbers of subnetworks differ, one figure for each."""
    numbers = result["arguments"]["subnetworks"]
    rows: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for record in result["records"]:
        rows.setdefault((record["model"], record["strategy"], record["coverage"]), []).append(record)
    order = sorted(rows, key=lambda row: (list(result["models"]).index(row[0]),))  # the rest stays as it was measured
    caption = f"{' and '.join(map(str, numbers))} subnetworks (one figure where both have the same):"
    cells = [[model, strategy, coverage(c), *_cells(rows[model, strategy, c])] for model, strategy, c in order]
    return f"{caption}\n\n{table(['model', 'strategy', 'C', *_HEADS], cells)}"


def _cells(records: list[dict[str, Any]]) -> list[str]:
    return [
        _each([str(record.get("units", "refused")) for record in records]),
        *(_figures(records, key) for key in ("flops", "best", "flops_with_shared", "flops_by_weights_alone")),
        _each([_bytes(record) for record in records]),
    ]


def _figures(records: list[dict[str, Any]], key: str) -> str:
    return _each([f"{record[key]:.3f}" if key in record else "" for record in records])


def _bytes(record: dict[str, Any]) -> str:
    return f"{record['bytes']:.3f} ({record['bytes_bound']:.3f})" if "bytes" in record else ""


def _each(texts: list[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
