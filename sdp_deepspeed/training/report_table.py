"""`sdp report`: one or more runs as one table, the last run being what the others are set against, and as plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.command_parser import Parser, read_json
from sdp_deepspeed.messages import listed
from sdp_deepspeed.sizes import mib_text
from sdp_deepspeed.training.curves import curve_of, flops_until, items_of, items_per_step, read_records
from sdp_deepspeed.training.metrics_log import of_kind
from sdp_deepspeed.training.phase_records import mean_over_steps, phase_reports, spread

REPORT_VERSION = 1


def configure(parser: Parser) -> None:
    """Arguments of `sdp report`."""
    parser.description = (
        "Runs side by side: what a worker pays in memory, traffic and time, and the dense validation loss.\n"
        "Memory, traffic and time are those of the rank with the most; quotients are with the last run.\n"
        "With a schedule memory is that of the phase with the most, traffic and time are means over all steps.\n"
        "A run that goes on, or was interrupted, counts as far as it has come.\n\n"
        "--plot draws the dense validation loss over tokens (what the data give), over FLOPs of all ranks (what the\n"
        "computing costs; subnetworks do fewer in a step) and over hours of training (what you wait), evaluations\n"
        "and checkpoints left out. The loss of a subnetwork, which training shows, is in no plot and no table.\n"
        "Steps while a run goes on: DeepSpeed's monitors (tensorboard, wandb, csv_monitor in its config)."
    )
    parser.epilog = (
        "examples:\n"
        "  sdp report runs/quickstart runs/quickstart/zero1\n"
        "  sdp report runs/forward runs/backward runs/zero1 --plot losses.png"
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="run folders; the last one is the baseline"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the losses: .png, .pdf or .svg (needs matplotlib)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reports = [load_report(folder) for folder in options.folders]
    for folder, report in zip(options.folders, reports, strict=True):  # a second run of the same method is told apart
        report["name"] = report["label"]
        if sum(other["label"] == report["label"] for other in reports) > 1:
            report["name"] = f"{report['label']} ({folder})"
    if options.plot is not None:
        from sdp_deepspeed.training.plots import plot_losses  # here: a table takes no matplotlib

        curves = zip(reports, options.folders, strict=True)
        plot_losses([curve_of(report["name"], read_records(folder)) for report, folder in curves], options.plot)
    print(table([report | {"label": report["name"]} for report in reports]))
    return 0


def load_report(folder: Path) -> dict[str, Any]:
    """A run folder's report, or what it would say now of a run that has not finished.

    Raises:
        ValueError: it is no folder, no step was made, or the report is of another version or shape.
    """
    if not folder.is_dir():
        raise ValueError(f"RUN: {folder} is no folder, expected one that a run's --run-folder named")
    path = folder / "report.json"
    report = {"flops": None, "phases": None} | (read_json(path, "RUN") if path.exists() else _so_far(folder))
    report.setdefault("dense_top1", None)
    report.setdefault("items", "images" if "images_per_step" in report else "tokens")
    if report["items"] == "images":  # which the rest of this module counts as it counts tokens
        report["tokens_per_step"] = report["images_per_step"]
    if report.get("version") != REPORT_VERSION:
        raise ValueError(f"{path} has version {report.get('version')!r}, expected {REPORT_VERSION}: run again")
    if wrong := [key for key, is_right in _SHAPE.items() if key not in report or not is_right(report[key])]:
        raise ValueError(f"{path}: {listed(wrong)}: missing, or not as a run writes it: run again")
    return report


def _so_far(folder: Path) -> dict[str, Any]:
    """From the records of a run."""
    records = read_records(folder)
    steps, evaluations, figures = (of_kind(records, kind) for kind in ("train", "evaluation", "figures"))
    if not steps:
        raise ValueError(
            f"{folder / 'report.json'} does not exist: the run has not finished, start it again to resume; nor has "
            "metrics.jsonl a step yet"
        )
    ranks = figures[-1]["ranks"] if figures else None
    last = evaluations[-1] if evaluations else {"dense_validation_loss": None}
    return {
        "version": REPORT_VERSION,
        "label": str(folder),
        "num_ranks": len(ranks) if ranks else 0,
        "steps": steps[-1]["step"],
        f"{items_of(steps[-1])}_per_step": items_per_step(steps),
        **{name: value for name, value in last.items() if name.startswith("dense_")},
        "step_seconds": spread([record["seconds"] for record in steps if record["timed"]]),
        "ranks": ranks,
        "flops": flops_until(records, steps[-1]["step"]),
        "phases": phase_reports(records),
        "hardware": "not finished",
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_numbers(value: Any, *names: str) -> bool:
    return isinstance(value, Mapping) and all(_is_number(value.get(name)) for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_figures(value: Any) -> bool:
    """One mapping for each rank."""
    return value is None or (isinstance(value, list) and all(_are_of_a_rank(rank) for rank in value))


def _are_of_a_rank(value: Any) -> bool:
    return _has_numbers(value, *_KINDS) and _is_number(value.get("flops", 0))  # older runs did not count FLOPs


def _are_phases(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_phase, value)))


def _is_phase(value: Any) -> bool:
    return isinstance(value, Mapping) and all(key in value and _SHAPE[key](value[key]) for key in _OF_A_PHASE)


_KINDS = ("weights", "gradients", "optimizer", "peak", "sent")
_OF_A_PHASE = ("label", "steps", "step_seconds", "ranks")
# What a report must have for the table; null stands for what was not measured.
_SHAPE: dict[str, Callable[[Any], bool]] = {
    "label": _is_text,
    "hardware": _is_text,
    "num_ranks": _is_number,
    "steps": _is_number,
    "tokens_per_step": _is_number,
    "dense_validation_loss": lambda value: value is None or _is_number(value),
    "dense_top1": lambda value: value is None or _is_number(value),  # of images
    "step_seconds": lambda value: value is None or _has_numbers(value, "median", "p10", "p90"),
    "ranks": _are_figures,
    "flops": lambda value: value is None or _is_number(value),
    "phases": _are_phases,  # null: no schedule; older runs had none
}


def _parts(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What has figures and times of its own: the phases of a schedule, or all of the run."""
    return report["phases"] or [report]


def _of_ranks(part: Mapping[str, Any], kinds: Sequence[str]) -> float | None:
    """The largest figure (sum of `kinds`) of all ranks: the worker that must be paid for. None: not measured."""
    return max(sum(rank[kind] for kind in kinds) for rank in part["ranks"]) if part["ranks"] else None


def _largest(*kinds: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads memory: a worker needs what the largest phase takes."""

    def read(report: Mapping[str, Any]) -> float | None:
        values = [_of_ranks(part, kinds) for part in _parts(report)]
        known = [value for value in values if value is not None]
        return max(known) if len(known) == len(values) else None

    return read


def _sent_bytes(report: Mapping[str, Any]) -> float | None:
    parts = _parts(report)
    return mean_over_steps(parts, [_of_ranks(part, ["sent"]) for part in parts])


def _median_seconds(report: Mapping[str, Any]) -> float | None:
    parts = _parts(report)
    return mean_over_steps(parts, [part["step_seconds"] and part["step_seconds"]["median"] for part in parts])


def _num_tokens(report: Mapping[str, Any]) -> float | None:
    return report["tokens_per_step"] * report["steps"]


def _tokens_per_second(report: Mapping[str, Any]) -> float | None:
    seconds = _median_seconds(report)
    return report["tokens_per_step"] / seconds if seconds else None


# Row title, where the number is, how it is written, whether a quotient with the baseline means something.
_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], Callable[[float], str], bool], ...] = (
    ("weights", _largest("weights"), mib_text, True),
    ("gradients", _largest("gradients"), mib_text, True),
    ("optimizer state", _largest("optimizer"), mib_text, True),
    ("model state, sum of the three", _largest("weights", "gradients", "optimizer"), mib_text, True),
    ("peak of live tensors", _largest("peak"), mib_text, True),
    ("bytes sent per step", _sent_bytes, mib_text, True),
    ("step time, median", _median_seconds, lambda x: f"{x * 1000:.0f} ms", True),
    ("all ranks: {items} per second", _tokens_per_second, lambda x: f"{x:.0f}", True),
    ("all ranks: {items} trained", _num_tokens, lambda x: f"{x:.4g}", True),
    ("all ranks: FLOPs", lambda report: report["flops"], lambda x: f"{x:.4g}", True),
    ("dense validation loss", lambda report: report["dense_validation_loss"], lambda x: f"{x:.4f}", False),
    ("dense top-1 accuracy", lambda report: report.get("dense_top1"), lambda x: f"{x:.2%}", False),
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
    items = " or ".join(sorted({report.get("items", "tokens") for report in reports}))
    columns = [["per worker (largest of all)", *(title.format(items=items) for title, *_ in _ROWS)]]
    columns += [[report["label"], *_cells(report, reports[-1])] for report in reports]
    if all(report.get("dense_top1") is None for report in reports):
        columns = [column[:-1] for column in columns]
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
        seconds = report["step_seconds"]
        times = f", step p10 {seconds['p10'] * 1000:.0f} ms, p90 {seconds['p90'] * 1000:.0f} ms" if seconds else ""
        missing = "" if report["ranks"] else "; memory and traffic were not measured"
        notes.append(
            f"{report['label']}: {report['num_ranks']} ranks, {report['steps']} steps{times}; "
            f"{report['hardware']}{missing}"
        )
        if len(_parts(report)) > 1:
            notes.append(f"  {listed(map(_of_phase, _parts(report)))}")
    if any(len(_parts(report)) > 1 for report in reports):
        notes.append("With phases: memory is the largest of any phase; traffic and step time are means over all steps.")
    return notes


def _of_phase(part: Mapping[str, Any]) -> str:
    seconds = part["step_seconds"]
    return f"{part['label']} in {part['steps']} steps" + (f" of {seconds['median'] * 1000:.0f} ms" if seconds else "")
