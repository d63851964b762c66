"""benchmarks/growth.py, as its user runs it: one rank of eight that are not there, on one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables.systems import growth
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow


def test_one_rank_of_eight(tmp_path: Path) -> None:
    output = tmp_path / "growth.json"
    command = [sys.executable, "benchmarks/growth.py", "--ranks", "8", "--layers", "1", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text(encoding="utf-8"))
    assert (result["device"], result["ranks"]) == ("CPU", 8)
    names = [row["name"] for row in result["results"]]
    assert names == ["ZeRO-1", "FSDP2", *(f"forward x {strategy} + ZeRO-1 C=0.5" for strategy in ("block", "neuron"))]
    assert [row.get("num_units") for row in result["results"]] == [None, None, 2, 12]
    for row in result["results"]:
        assert len(row["seconds"]) == 2
        assert row["sent"] > 0
        assert sum(row["calls"].values()) >= 3
    assert growth(result).count("\n| ") == 2 + len(names)
