"""Commands as their users type them: what needs an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sdp_deepspeed.training.user_errors import MISTAKE_EXIT_CODE
from tests.helpers.example_reports import report
from tests.helpers.repository import ROOT


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "launch/pretrain.py", "--model", "nowhere.json"]
    result = subprocess.run(
        [*command, "--deepspeed_config", "configs/quickstart.json", "--run-folder", "runs/never", "--steps", "1"],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == MISTAKE_EXIT_CODE
    assert result.stderr == "error: --model: cannot read nowhere.json: No such file or directory\n"


def test_the_quickstart_takes_no_arguments() -> None:
    result = subprocess.run(
        ["bash", "launch/quickstart.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=9
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: quickstart.sh takes no arguments, got: test;")
    assert not result.stdout


def test_reports_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1)))
    script = (
        "import sys; sys.modules['torch'] = None; "
        "from sdp_deepspeed.training.report_table import main; sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "1.00 MiB" in result.stdout
