"""Tables of what a GPU measures, of results that were made up; one of a CPU has fewer figures."""

from __future__ import annotations

from typing import Any

from benchmarks.on_gpu import WHERE
from benchmarks.sizes.cells import LIMITS
from benchmarks.tables import gpu
from benchmarks.tables.make import IN_FULL

CELL: dict[str, Any] = {
    "size": "1B",
    "subject": "forward x block, C=0.5",
    "checkpointing": False,
    "rows": 4,
    "sequence": 2048,
    "device": "H100",
    "seconds": [0.25, 0.2, 0.4],
    "mfu": 0.456,
    "peaks": {"1": 2**30, "4": 3 * 2**30},
    "largest": {"24": {"rows": 0}, "40": {"rows": 7, "seconds": 1.0, "peak": 5}, "80": None},
}


def rows(text: str) -> list[list[str]]:
    """Of the table in it, without its heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_section_has_a_table() -> None:
    assert {f"gpu_{section}" for section in (*WHERE, "steps", "bandwidth", "sizes")} <= IN_FULL.keys()
    assert tuple(map(int, gpu._LIMITS)) == LIMITS


def test_sizes_with_and_without_checkpointing_are_in_a_row() -> None:
    other = CELL | {
        "checkpointing": True,
        "mfu": None,
        "largest": None,
        "peaks": {"1": None, "4": None},
        "device": "L4",
    }
    large = {key: CELL[key] for key in ("rows", "sequence", "size", "checkpointing")}
    large |= {"subject": "DDP", "not_measured": "out of memory", "largest": None, "device": "H100"}
    text = gpu.sizes({"device": "H100", "results": [CELL, other, large]})
    assert text.startswith("H100 and L4, rank 3 of 8, micro-batches of 4 x 2048 tokens; ")
    first = ["1B", "forward x block, C = 1/2", "250.0", "0.46", "3.0", "0, 7, -", "250.0", "", "", ""]
    assert rows(text) == [first, ["1B", "DDP", "too large", *[""] * 7]]


def test_failures_are_named() -> None:
    passed = {"name": "a", "outcome": "passed", "why": None}
    failed = {"name": "b", "outcome": "failure", "why": "Traceback\nAssertionError: 3\n"}
    result: dict[str, Any] = {"device": "H100", "is_complete": True, "tests": [passed], "outcomes": {"passed": 1}}
    assert gpu.tests(result) == "H100: 1 passed."
    result |= {"tests": [passed, failed], "outcomes": {"passed": 1, "failure": 1}, "is_complete": False}
    assert gpu.tests(result).startswith("H100: 1 failure, 1 passed; not all have run.")
    assert rows(gpu.tests(result)) == [["b", "failure", "AssertionError: 3"]]


def test_steps_have_a_row_for_each_phase() -> None:
    phase = {"times": [{"wall_seconds": 0.25, "host_seconds": 0.1}], "busy_seconds": 0.2, "idle_seconds": 0.05}
    phases = {"forward_backward": phase | {"num_kernels": 9, "peak": 2**21}}
    phases["step"] = phases["forward_backward"] | {"busy_seconds": None, "idle_seconds": None, "peak": None}
    case = {"model": "7B", "strategy": "block", "num_ranks": 8, "estimate": {"state": 2**20}, "phases": phases}
    assert rows(gpu.steps({"device": "H100", "results": [case]})) == [
        ["7B, block, 8 ranks", "forward and backward", "250.0", "100.0", "200.0", "50.0", "9", "2", "1"],
        ["7B, block, 8 ranks", "step", "250.0", "100.0", "", "", "9", "", "1"],
    ]


def test_bandwidth_by_offset_and_size() -> None:
    found = [
        {"bytes": num_bytes, "sent_offset": 0, "received_offset": offset, "median": num_bytes / 2**20 + offset}
        for num_bytes in (2**20, 2**24)
        for offset in (0, 2)
    ]
    assert rows(gpu.bandwidth({"device": "H100", "results": found})) == [
        ["0", "0", "1.0", "16.0"],
        ["0", "2", "3.0", "18.0"],
    ]
    nothing = {"device": "CPU", "results": [], "not_measured": "needs NCCL"}
    assert gpu.bandwidth(nothing) == "CPU: needs NCCL."
