"""`sdp report`: report.json of one or more runs as one table, the last run being what the others are set against."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.command_parser import Parser, read_json
from sdp_deepspeed.messages import listed
from sdp_deepspeed.sizes import mib_text

REPORT_VERSION = 1


def configure(parser: Parser) -> None:
    """Arguments of `sdp report`."""
    parser.description = (
        "Finished runs side by side: what a worker pays in memory, traffic and time, and the dense validation loss.\n"
        "Figures are those of the rank with the most; quotients are with the last run."
    )
    parser.epilog = "example: sdp report runs/quickstart runs/quickstart/zero1"
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="run folders; the last one is the baseline"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    print(table([load_report(folder) for folder in options.folders]))
    return 0


def load_report(folder: Path) -> dict[str, Any]:
    """A run folder's report.

    Raises:
        ValueError: there is none (the run has not finished), or it is of another version or shape.
    """
    path = folder / "report.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run has not finished, start it again to resume")
    report = read_json(path, "RUN")
    if report.get("version") != REPORT_VERSION:
        raise ValueError(f"{path} has version {report.get('version')!r}, expected {REPORT_VERSION}: run again")
    if wrong := [key for key, is_right in _SHAPE.items() if key not in report or not is_right(report[key])]:
        raise ValueError(f"{path}: {listed(wrong)}: missing, or not as a run writes it: run again")
    return report


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_numbers(value: Any, *names: str) -> bool:
    return isinstance(value, Mapping) and all(_is_number(value.get(name)) for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_figures(value: Any) -> bool:
    """One mapping for each rank."""
    return value is None or (isinstance(value, list) and all(_has_numbers(rank, *_KINDS) for rank in value))


_KINDS = ("weights", "gradients", "optimizer", "peak", "sent")
# What a report must have for the table; null stands for what was not measured.
_SHAPE: dict[str, Callable[[Any], bool]] = {
    "label": _is_text,
    "hardware": _is_text,
    "num_ranks": _is_number,
    "steps": _is_number,
    "dense_validation_loss": lambda value: value is None or _is_number(value),
    "step_seconds": lambda value: value is None or _has_numbers(value, "median", "p10", "p90"),
    "ranks": _are_figures,
}


def _largest(*kinds: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads the largest figure (sum of `kinds`) of all ranks: the worker that must be paid for. None: not measured."""

    def read(report: Mapping[str, Any]) -> float | None:
        ranks = report["ranks"]
        return max(sum(rank[kind] for kind in kinds) for rank in ranks) if ranks else None

    return read


def _median_seconds(report: Mapping[str, Any]) -> float | None:
    return report["step_seconds"] and report["step_seconds"]["median"]


# Row title, where the number is, how it is written, whether a quotient with the baseline means something.
_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], Callable[[float], str], bool], ...] = (
    ("weights", _largest("weights"), mib_text, True),
    ("gradients", _largest("gradients"), mib_text, True),
    ("optimizer state", _largest("optimizer"), mib_text, True),
    ("model state, sum of the three", _largest("weights", "gradients", "optimizer"), mib_text, True),
    ("peak of live tensors", _largest("peak"), mib_text, True),
    ("bytes sent per step", _largest("sent"), mib_text, True),
    ("step time, median", _median_seconds, lambda x: f"{x * 1000:.0f} ms", True),
    ("dense validation loss", lambda report: report["dense_validation_loss"], lambda x: f"{x:.4f}", False),
)


def _cells(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    cells = []
    for _, value_of, write, has_quotient in _ROWS:
        value, reference = value_of(report), value_of(baseline)
        if value is None:
            cells.append("-")
        elif has_quotient and reference and report is not baseline:
            cells.append(f"{write(value)} ({value / reference:.2f}x)")
        else:
            cells.append(write(value))
    return cells


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """The reports side by side; quotients are with the last one."""
    columns = [["per worker (largest of all)", *(title for title, *_ in _ROWS)]]
    columns += [[report["label"], *_cells(report, reports[-1])] for report in reports]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        first, *rest = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *_notes(reports)])


def _notes(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for report in reports:
        spread = report["step_seconds"]
        times = f", step p10 {spread['p10'] * 1000:.0f} ms, p90 {spread['p90'] * 1000:.0f} ms" if spread else ""
        missing = "" if report["ranks"] else "; memory and traffic were not measured"
        notes.append(
            f"{report['label']}: {report['num_ranks']} ranks, {report['steps']} steps{times}; "
            f"{report['hardware']}{missing}"
        )
    return notes
