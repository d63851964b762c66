"""Where a figure comes from: commit, versions, hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from sdp_deepspeed.atomic_files import write_text


def provenance() -> dict[str, object]:
    """Facts to keep beside raw figures. "dirty" says whether the tree had uncommitted changes, of other files than such
    figures; None like the commit where the code was copied without its repository."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads_per_rank": int(os.environ.get("OMP_NUM_THREADS", "0")),
    }


_CODE = (":/", ":(top,exclude)benchmarks/results")  # with the first result of several the others are not yet made


def write_result(path: str | Path, result: dict[str, object]) -> None:
    """Raw figures with their provenance as JSON; one rank calls it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result | {"provenance": provenance()}, indent=1) + "\n"
    write_text(target, text)  # some go on from what is there: it must be whole


def _git(*arguments: str) -> str | None:
    """What git says; None without git or a repository."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
