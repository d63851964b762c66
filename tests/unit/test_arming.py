"""`sdp arm`: a line that every Python of an environment runs at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.arming import FILE, SWITCH
from tests.helpers.repository import ROOT

# What a Python does with a folder of site-packages, and who is there afterward.
PROGRAM = """
import site, sys
site.addsitedir(sys.argv[1])
print("sdp_deepspeed" in sys.modules, sorted({"torch", "numpy", "deepspeed", "transformers"} & sys.modules.keys()))
"""


def started(folder: Path, **environment: str) -> str:
    command = (
        [sys.executable, "-I", "-c", PROGRAM, str(folder)]
        if "PYTHONPATH" not in environment
        else [sys.executable, "-c", PROGRAM, str(folder)]
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, cwd=folder
    )
    assert not done.stderr
    return done.stdout.strip()


def test_an_armed_python_imports_the_package_and_nothing_heavy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = str(ROOT)
    assert started(tmp_path, PYTHONPATH=found) == "False []"
    assert main(["arm", "--site-packages", str(tmp_path)]) == 0
    assert str(tmp_path / FILE) in capsys.readouterr().out
    assert started(tmp_path, PYTHONPATH=found) == "True []"
    assert started(tmp_path, PYTHONPATH=found, **{SWITCH: "0"}) == "False []"
    assert main(["arm", "--off", "--site-packages", str(tmp_path)]) == 0
    assert started(tmp_path, PYTHONPATH=found) == "False []"
    assert not list(tmp_path.iterdir())
    assert main(["arm", "--off", "--site-packages", str(tmp_path)]) == 0
    assert "is not there" in capsys.readouterr().out


def test_a_file_that_outlives_the_package_is_silent(tmp_path: Path) -> None:
    """Python prints a traceback for a line that fails, at every start."""
    main(["arm", "--site-packages", str(tmp_path)])
    (tmp_path / "sdp_deepspeed.py").write_text("raise ImportError('gone')")  # found before any other
    assert started(tmp_path, PYTHONPATH=str(tmp_path)) == "False []"


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arm", "--site-packages", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: --site-packages: there is no folder {tmp_path / 'none'}\n"
