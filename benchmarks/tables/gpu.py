"""Markdown tables of what `on_gpu.py` measures; each begins with the GPU's name."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.tables.markdown import MIB, Result, for_readers, table

_GIB = 2**30
_LIMITS = ("24", "40", "80")  # GB


def sizes(result: Result) -> str:
    """A row for each model and subject, without activation checkpointing and with it."""
    cells = {(cell["size"], cell["subject"], cell["checkpointing"]): cell for cell in result["results"]}
    rows = []
    for size, subject in dict.fromkeys((size, subject) for size, subject, _ in cells):
        row = [size, for_readers(subject)]
        for checkpointing in (False, True):
            row += _of_cell(cells.get((size, subject, checkpointing)))
        rows.append(row)
    heads = [f"{name}{', checkpointing' * again}" for again in (False, True) for name in _HEADS]
    shapes = {f"{cell['rows']} x {cell['sequence']}" for cell in cells.values()}
    caption = f"{_devices(result)}, rank 3 of 8, micro-batches of {', '.join(sorted(shapes))} tokens; "
    caption += "weights of DDP and FSDP2 in fp32, of all others in bf16:"
    return f"{caption}\n\n" + table(["model", "", *heads], rows)


_HEADS = ("ms", "utilization", "peak, GiB", "rows in " + ", ".join(_LIMITS) + " GB")


def _of_cell(cell: dict[str, Any] | None) -> list[str]:
    if cell is None:
        return [""] * len(_HEADS)
    if "not_measured" in cell:
        return ["too large", "", "", ""]
    peak, largest = cell["peaks"].get(str(cell["rows"])), cell["largest"] or {}
    fitting = [_number((largest.get(limit) or {}).get("rows"), "{:.0f}") or "-" for limit in _LIMITS]
    return [
        f"{1e3 * median(cell['seconds']):.1f}",
        _number(cell["mfu"], "{:.2f}"),
        _number(None if peak is None else peak / _GIB, "{:.1f}"),
        ", ".join(fitting) if largest else "",
    ]


def tests(result: Result) -> str:
    """How many passed, and each other one with its reason's last line."""
    others = [test for test in result["tests"] if test["outcome"] != "passed"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items())) or "none"
    caption = f"{_devices(result)}: {counts}{'' if result['is_complete'] else '; not all have run'}."
    if not others:
        return caption
    rows = [[test["name"], test["outcome"], ((test["why"] or "").strip().splitlines() or [""])[-1]] for test in others]
    return f"{caption}\n\n" + table(["test", "outcome", "why"], rows)


def steps(result: Result) -> str:
    """A row for each case and phase."""
    rows = []
    for case in result["results"]:
        for name, phase in case["phases"].items():
            walls, hosts = ([time[key] for time in phase["times"]] for key in ("wall_seconds", "host_seconds"))
            row = [f"{case['model']}, {case['strategy']}, {case['num_ranks']} ranks", name.replace("_", " and ")]
            row += [f"{1e3 * median(seconds):.1f}" for seconds in (walls, hosts)]
            row += [_milliseconds(phase["busy_seconds"]), _milliseconds(phase["idle_seconds"])]
            row += [str(phase["num_kernels"]), _mib(phase["peak"]), _mib(case["estimate"]["state"])]
            rows.append(row)
    heads = ("", "", "ms", "host, ms", "kernels, ms", "idle, ms", "kernels", "peak, MiB", "estimated state, MiB")
    return f"{_devices(result)}, one rank without peers:\n\n" + table(heads, rows)


def bandwidth(result: Result) -> str:
    """GB/s: a row for each pair of offsets, a column for each size."""
    if "not_measured" in result:
        return f"{_devices(result)}: {result['not_measured']}."
    found = {(row["sent_offset"], row["received_offset"], row["bytes"]): row["median"] for row in result["results"]}
    all_bytes = sorted({num_bytes for _, _, num_bytes in found})
    rows = [
        [str(sent), str(received), *(f"{found[sent, received, num_bytes]:.1f}" for num_bytes in all_bytes)]
        for sent, received in sorted({(sent, received) for sent, received, _ in found})
    ]
    heads = ["sent from", "received at", *(f"{num_bytes / MIB:g} MiB" for num_bytes in all_bytes)]
    return f"{_devices(result)}, one rank with itself over NCCL, GB/s by offset in bytes:\n\n" + table(heads, rows)


def _devices(result: Result) -> str:
    """Of the cells, where each has its own: a file may be gone on with elsewhere."""
    names = dict.fromkeys(str(cell.get("device", result["device"])) for cell in result.get("results", []))
    return " and ".join(names) or str(result["device"])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e3 * seconds, "{:.1f}")


def _mib(num_bytes: int | None) -> str:
    return _number(None if num_bytes is None else num_bytes / MIB, "{:.0f}")
