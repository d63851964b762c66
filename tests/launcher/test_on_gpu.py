"""benchmarks/on_gpu.py on the CPU: a little of each section; what needs a GPU says so."""

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


def run(folder: Path, *arguments: str, code: int = 0, within: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The raw figures and what was printed; `within` is a command that runs this one."""
    output = folder / "new" / "raw.json"
    command = [*within, sys.executable, str(ROOT / "benchmarks/on_gpu.py"), arguments[0], "--output", str(output)]
    done = subprocess.run(
        [*command, *arguments[1:]],
        env=os.environ | ON_THE_CPU,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["device"] == "CPU"
    assert result["what"] == f"gpu_{arguments[0]}"
    return result, done.stdout


def test_values_are_compared_with_the_reference(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "values", "--select", "flash-2of4-forward-block")
    assert result["outcomes"] == {"passed": 1}
    assert result["is_complete"]
    assert "flash-2of4-forward-block" in result["tests"][0]["name"]


def test_that_no_test_ran_is_a_failure(tmp_path: Path) -> None:
    result, printed = run(tmp_path, "values", "--select", "no_such_test", code=1)
    assert (result["tests"], result["is_complete"]) == ([], False)
    assert "not all of it has run" in printed


def test_what_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """Also where interrupts are ignored, as in a shell's background."""
    in_background = ("env", "--ignore-signal=INT")
    assert not run(tmp_path, "values", "--minutes", "0.02", code=1, within=in_background)[0]["is_complete"]


def test_bandwidth_needs_nccl(tmp_path: Path) -> None:
    result, printed = run(tmp_path, "bandwidth")
    assert result["results"] == []
    assert "needs NCCL" in printed
    assert "needs NCCL" in result["not_measured"]


def test_sizes_go_on_where_the_file_ends(tmp_path: Path) -> None:
    """Every kind of subject, and the same operations whether activations are kept or made again."""
    kept = {"size": "tiny", "subject": "ZeRO-2", "checkpointing": False, "rows": 4, "sequence": 16, "device": "CPU"}
    output = tmp_path / "new" / "raw.json"
    output.parent.mkdir()
    output.write_text(json.dumps({"what": "gpu_sizes", "results": [kept | {"seconds": [1.5]}]}), encoding="utf-8")
    pattern = r"(DDP|ZeRO-2|ZeRO-1|FSDP2|forward x block, C=0.5(, checkpointing)?)$"
    result, printed = run(tmp_path, "sizes", "--select", pattern)
    assert result["is_complete"]
    assert result["results"][0] == kept | {"seconds": [1.5]}, "it was done"
    assert "ZeRO-2" not in printed
    found = {(cell["subject"], cell["checkpointing"]): cell for cell in result["results"][1:]}
    assert len(found) == len(result["results"]) - 1 == 5
    dense = found["DDP", False]["flops"]
    half, again = (found["forward x block, C=0.5", checkpointing] for checkpointing in (False, True))
    assert dense == found["ZeRO-1", False]["flops"] == found["FSDP2", False]["flops"]
    assert 0.5 * dense < half["flops"] == again["flops"] < 0.6 * dense  # embeddings and head are everybody's
    assert half["estimate"]["weights"] < again["estimate"]["state"]
    for cell in found.values():
        assert (cell["mfu"], cell["largest"]) == (None, None)  # of a CPU nobody knows
        assert cell["tokens_per_second"] > 0
