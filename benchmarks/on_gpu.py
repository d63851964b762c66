"""What a machine with a GPU is asked, a section a call; one GPU is enough.

    python benchmarks/on_gpu.py values --output benchmarks/results/gpu_values.json        # against the reference
    python benchmarks/on_gpu.py streams --output benchmarks/results/gpu_streams.json      # lifetimes on real streams
    python benchmarks/on_gpu.py bandwidth --output benchmarks/results/gpu_bandwidth.json  # NCCL by alignment
    python benchmarks/on_gpu.py sizes --output benchmarks/results/gpu_sizes.json          # 134M to 1B, rank 3 of 8

`values` and `streams` are tests marked gpu; --select and --minutes fit them into what time there is. `sizes` goes on
where the file ends, so that the same call again does the rest. Under DS_ACCELERATOR=cpu each section does a little of
it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.device import device, device_name
from benchmarks.common.models import LLAMAS
from benchmarks.common.provenance import write_result

ROOT = Path(__file__).parents[1]
_STREAMS = "tests/ranks/test_late_streams.py"
WHERE = {"values": ("tests/ranks", f"--ignore={_STREAMS}"), "streams": (_STREAMS, "tests/unit")}  # tests marked gpu
_FEW = {"values": ("tests/ranks/test_gpu.py",)}  # of them on the CPU
OUTCOMES = ("failure", "error", "skipped")  # as pytest's XML calls them; a test without one passed


def run_tests(section: str, arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = device().type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-k", arguments.select]
        # A file's ranks stay together; several files share the GPU.
        command += ["--gpu", "-n", str(arguments.processes), "--dist", "loadfile"] if on_gpu else []
        command += WHERE[section] if on_gpu else _FEW.get(section, WHERE[section])
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it, and theirs
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            is_complete = process.wait(60 * arguments.minutes) in (0, 1)
        except subprocess.TimeoutExpired:
            is_complete = False
            _stop(process)
        tests = read_report(report)
    return {"is_complete": is_complete, "tests": tests, "outcomes": Counter(test["outcome"] for test in tests)}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As by Ctrl-C, so that what has run is reported; what hangs even then is killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_report(path: Path) -> list[dict[str, Any]]:
    """Name, seconds and outcome of each test, and why it failed or was skipped; none if pytest did not come so far."""
    if not path.is_file():
        return []
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        found = [(child.tag, child.text or child.get("message")) for child in case if child.tag in OUTCOMES]
        outcome, why = found[0] if found else ("passed", None)
        name = f"{case.get('classname')}::{case.get('name')}"
        tests.append({"name": name, "seconds": float(case.get("time", 0)), "outcome": outcome, "why": why})
    return tests


def run_bandwidth(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.self_send import measure, why_not

    reason = why_not()
    return measure(repeats=arguments.repeats) if reason is None else {"results": [], "not_measured": reason}


def run_sizes(arguments: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Cells that the output lacks, until time is over; the file has each as soon as it is there."""
    from benchmarks.common.fake_world import fake_world
    from benchmarks.sizes.cells import RANK, WORLD_SIZE, cells, is_done, measure, shape_of

    on_gpu, path = device().type == "cuda", Path(arguments.output)
    sequence = {} if on_gpu else {"sequence": 16}
    options = {"rows": arguments.rows, "sequence": arguments.sequence} | sequence
    results: list[dict[str, Any]] = []
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["what"] != "gpu_sizes":
            raise ValueError(f"--output {path} has figures of {kept['what']}; name another file")
        results = kept["results"]
    chosen = list(cells(arguments.sizes if on_gpu else ["tiny"], arguments.select, **options))
    todo = [cell for cell in chosen if not is_done(cell, results)]
    end = datetime.now(tz=UTC) + timedelta(minutes=arguments.minutes)
    with fake_world(RANK, WORLD_SIZE):
        while todo and datetime.now(tz=UTC) < end:
            cell = todo.pop(0)
            results.append(measure(cell, shape_of(cell.size), repeats=arguments.repeats if on_gpu else 1))
            write({"results": results})
            print(f"{cell.name}: {results[-1]['took_seconds']:.0f} s; {len(todo)} to do", flush=True)
    return {"is_complete": not todo, "results": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=[*WHERE, "bandwidth", "sizes"])
    parser.add_argument("--output", required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--processes", type=int, default=4, help="of pytest")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which tests are stopped, no cell begins")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rows", type=int, default=4, help="sizes: of a micro-batch")
    parser.add_argument("--sizes", nargs="+", choices=list(LLAMAS), default=["134M", "500M", "1B"])
    parser.add_argument("--select", default="", help="which tests, as pytest's -k; which cells of sizes, as a pattern")
    arguments = parser.parse_args()
    facts = {"what": f"gpu_{arguments.section}", "device": device_name(), "arguments": vars(arguments)}

    def write(result: dict[str, Any]) -> None:
        write_result(arguments.output, facts | result)

    if arguments.section in WHERE:
        result = run_tests(arguments.section, arguments)
    elif arguments.section == "sizes":
        try:
            result = run_sizes(arguments, write)
        except ValueError as error:
            sys.exit(f"error: {error}")
    else:
        result = run_bandwidth(arguments)
    write(result)
    outcomes = result.get("outcomes", {"passed": 1})
    if "not_measured" in result:
        print(result["not_measured"])
    if not result.get("is_complete", True):
        print("not all of it has run")
        return 1
    return int(not outcomes.get("passed") or any(outcomes.get(name) for name in ("failure", "error")))


if __name__ == "__main__":
    sys.exit(main())
