"""A wheel has all that the command needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.repository import ROOT


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), env=os.environ | environment, capture_output=True, text=True, timeout=600, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_answers(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "sdp_deepspeed", source / "sdp_deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("sdp_deepspeed-*.whl")
    run(*pip, "install", "--no-deps", "--target", installed, wheel)
    assert run(installed / "bin/sdp", "--help", PYTHONPATH=str(installed)).startswith("usage: sdp ")
    where = run(sys.executable, "-c", "import sdp_deepspeed; print(sdp_deepspeed.__file__)", PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    shipped = {str(path.relative_to(installed)) for path in installed.glob("sdp_deepspeed/**/*.py")}
    assert shipped == {str(path.relative_to(source)) for path in source.glob("sdp_deepspeed/**/*.py")}
