"""benchmarks/on_gpu.py on the CPU: the sizes of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gpus import ON_THE_CPU
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The raw figures."""
    output = folder / "raw.json"
    command = [sys.executable, str(ROOT / "benchmarks/on_gpu.py"), arguments[0], "--output", str(output)]
    options: dict[str, Any] = {"env": os.environ | ON_THE_CPU, "cwd": folder, "capture_output": True, "text": True}
    done = subprocess.run([*command, *arguments[1:]], **options, timeout=600, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    assert (result["device"], result["what"]) == ("CPU", f"gpu_{arguments[0]}")
    return result


def test_sizes_continue_where_the_file_ends(tmp_path: Path) -> None:
    """Half of the blocks need half of their FLOPs, on both hosts; and no less state than the plan says."""
    names = "(DDP|ZeRO-1|FSDP2|forward x block, C=0.5)$"
    first = run(tmp_path, "sizes", "--select", "DDP$")["results"]
    result = run(tmp_path, "sizes", "--select", names)
    assert result["is_complete"]
    assert result["results"][: len(first)] == first, "not measured again"
    flops = {cell["name"]: cell["flops"] for cell in result["results"]}
    dense = flops["DDP"]
    assert dense == flops["ZeRO-1"] == flops["FSDP2"]
    for host in ("ZeRO-1", "FSDP2"):
        half = flops[f"SDP + {host}, forward x block, C=0.5"]
        assert 0.5 * dense < half < 0.6 * dense  # embeddings and head are everybody's
