"""launch/_environment.sh: which Python it takes and what it installs. Nothing is installed: pip is a stub."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

FILES = ["pyproject.toml", "constraints.txt", "sdp_deepspeed/version.py", "launch/_environment.sh"]
PIP = "import os, sys; print(*sys.argv[4:], file=open(os.environ['LOG'], 'a'))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that an installation reads, in a folder of their own."""
    for name in FILES:
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


def make_venv(folder: Path, torch: str = "") -> Path:
    """An environment with a pip that only writes down what it is asked for, and with a torch or none."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(PIP)
    if torch:
        (packages / f"torch-{torch}.dist-info").mkdir()
        (packages / f"torch-{torch}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    return folder


def source_script(checkout: Path, then: str = "", **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and what pip was asked for by all calls so far."""
    log = checkout.parent / "log"
    settings = {"PATH": "/usr/bin:/bin", "LOG": str(log)} | environment
    if "VIRTUAL_ENV" in environment:
        settings["PATH"] = f"{environment['VIRTUAL_ENV']}/bin:{settings['PATH']}"
    command = ["bash", "-c", f"set -euo pipefail; source launch/_environment.sh test; {then}"]
    done = subprocess.run(command, cwd=checkout, env=settings, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines() if log.exists() else []


def test_an_environment_of_its_own_gets_the_versions_of_the_constraints(checkout: Path) -> None:
    constraints = make_venv(checkout / ".venv", torch="2.12.0") / "constraints.txt"
    code, said, asked = source_script(checkout)
    assert code == 0, said
    assert asked == [f"--constraint {constraints} {what}" for what in ("torch", "--editable .[test]")]
    assert constraints.read_text() == (ROOT / "constraints.txt").read_text()
    assert source_script(checkout)[2] == asked, "a second time installs nothing"


def test_an_active_environment_keeps_its_torch(checkout: Path) -> None:
    theirs = make_venv(checkout.parent / "theirs", torch="2.13.0a0+nv26.5")
    code, said, asked = source_script(checkout, VIRTUAL_ENV=str(theirs))
    assert code == 0, said
    assert asked == [f"--constraint {theirs}/constraints.txt --editable .[test]"]
    pinned = (theirs / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line.startswith("torch==")] == ["torch==2.13.0a0+nv26.5"]
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_too_old_is_named(checkout: Path) -> None:
    theirs = checkout.parent / "theirs"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin/python").write_text('#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.1\nexit $(($# > 1))\n')
    (theirs / "bin/python").chmod(0o755)
    code, said, asked = source_script(checkout, VIRTUAL_ENV=str(theirs))
    assert (code, asked) == (1, [])
    assert "error: Python 3.11 to 3.14 is needed, found Python 3.9.1" in said


def test_a_missing_compiler_is_named(checkout: Path) -> None:
    theirs = make_venv(checkout.parent / "theirs", torch="2.13.0")
    code, said, _ = source_script(checkout, "build_cpu_adam", VIRTUAL_ENV=str(theirs), CXX="/nowhere/c++")
    assert code == 1
    assert "needs a C++ compiler and Python's headers; install them (Debian, Ubuntu: g++" in said
