"""The package as a user gets it: a wheel and a source distribution, with commands and types."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.programs import ended
from tests.helpers.repository import ROOT

PIP = ("-m", "pip", "--disable-pip-version-check")
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
SCRIPT = """\
import sdp_deepspeed
from sdp_deepspeed.fsdp import clip_grad_norm_
reveal_type(sdp_deepspeed.Plan.load("plan.json"))
reveal_type(clip_grad_norm_)
sdp_deepspeed.fully_shard(3)
"""


def run(*command: object, cwd: Path = Path("/"), code: int = 0, **environment: str) -> str:
    return ended(command, cwd=cwd, code=code, **environment).stdout


def source_in(folder: Path) -> Path:
    """A copy to build from: building writes beside the sources."""
    source = folder / "source"
    shutil.copytree(ROOT / "sdp_deepspeed", source / "sdp_deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", source / "configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


def wheel_of(source: Path, folder: Path) -> Path:
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("sdp_deepspeed-*.whl")
    return wheel


def files_in(package: Path) -> set[str]:
    return {str(path.relative_to(package)) for path in package.glob("**/*") if path.suffix in (".py", ".typed")}


def test_a_wheel_answers(tmp_path: Path) -> None:
    source, installed = source_in(tmp_path), tmp_path / "installed"
    wheel = wheel_of(source, tmp_path)
    run(sys.executable, *PIP, "install", "--no-deps", "--target", installed, wheel)
    assert run(installed / "bin/sdp", "--help", PYTHONPATH=str(installed)).startswith("Usage: sdp ")
    where = run(sys.executable, "-c", "import sdp_deepspeed; print(sdp_deepspeed.__file__)", PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    assert files_in(installed / "sdp_deepspeed") == files_in(source / "sdp_deepspeed")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment with a wheel that was built from the source distribution. Only its dependencies are shared
    with the environment of the tests."""
    folder = tmp_path_factory.mktemp("clean")
    source = source_in(folder)
    sdist = folder / run(sys.executable, "-c", BUILD_SDIST, folder, cwd=source).split()[-1]
    wheel = wheel_of(sdist, folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(sys.executable, *PIP, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return python


@pytest.mark.slow
def test_a_clean_environment_answers(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import sdp_deepspeed; print(sdp_deepspeed.__file__)", PYTHONPATH="")
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert run(python.parent / "sdp", "--version", PYTHONPATH="").startswith("sdp_deepspeed ")
    assert "transformers" in run(python, "-m", "sdp_deepspeed", "env", PYTHONPATH="")
    estimate = (python.parent / "sdp", "estimate", "llama_134m", "--ranks", "8")  # the wheel's recipe
    assert "SDP" in run(*estimate, cwd=tmp_path, PYTHONPATH="")


@pytest.mark.slow
def test_a_users_type_checker_sees_types(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--follow-untyped-imports", "script.py"]
    found = run(*command, cwd=tmp_path, code=1, PYTHONPATH="").splitlines()
    lines = [line for line in found if line.startswith("script.py:")]
    assert "sdp_deepspeed.plan.plan.Plan" in lines[0]
    assert "def (" in lines[1]
    assert "script.py:5: error" in lines[2]
