"""The notebook, cell by cell, in one process beside the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

NOTEBOOK = ROOT / "launch/examples/quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], cwd=NOTEBOOK.parent, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "8 units, 4 subnetworks, 2 holders each (coverage 0.5)" in done.stdout
    assert "absent" in done.stdout
    assert "loss of the dense model: " in done.stdout
    assert "197184 parameters, loss " in done.stdout.splitlines()[-1]
