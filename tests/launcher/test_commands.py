"""Commands as their users type them: what needs an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import VERBS
from sdp_deepspeed.command_parser import USER_ERROR_EXIT_CODE
from tests.helpers.example_reports import report
from tests.helpers.repository import ROOT

NEW = {"arm", "hosts"}  # verbs that never were modules to run
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy", "pydantic"}


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "launch/pretrain.py", "--model", "nowhere.json"]
    result = subprocess.run(
        [*command, "--deepspeed_config", "configs/quickstart.json", "--run-folder", "runs/never", "--steps", "1"],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == USER_ERROR_EXIT_CODE
    assert result.stderr == "error: --model: cannot read nowhere.json: No such file or directory\n"


def test_the_quickstart_takes_no_arguments() -> None:
    result = subprocess.run(
        ["bash", "launch/quickstart.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: quickstart.sh takes no arguments, got: test;")
    assert not result.stdout


def heavy_modules_of(*arguments: str) -> set[str]:
    """Which packages that are slow to import one command imports."""
    script = (
        "import sys\nfrom sdp_deepspeed.__main__ import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        f"print('imported:', *sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)\nsys.exit(code)"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()[1:])


def test_what_needs_no_tensors_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1)))
    for arguments in (["--help"], ["report", str(tmp_path)], ["estimate"]):
        assert heavy_modules_of(*arguments) == set(), arguments


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in NEW])
def test_old_forms_say_what_they_are_called_now(verb: str) -> None:
    command = [sys.executable, "-m", f"sdp_deepspeed.{verb}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m sdp_deepspeed.{verb} ")
    assert f"is now called: sdp {verb} " in done.stderr


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdp_deepspeed", "estimate"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 ranks, C = 0.5, forward regime, bf16, 1 micro-steps\n")
    assert not done.stderr
