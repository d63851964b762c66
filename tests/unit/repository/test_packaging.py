"""pyproject.toml, constraints.txt, the launch scripts and the README agree on what can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from launch._torch import Torch, torch_range
from tests.helpers.repository import ROOT

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
# A Python goes in when every line of constraints.txt has a wheel for it, or is pure Python.
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def test_one_range_of_pythons_everywhere() -> None:
    prefix = "Programming Language :: Python :: "
    assert [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)] == PYTHONS
    declared = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(30) if f"3.{minor}.1" in declared] == [int(name[2:]) for name in PYTHONS]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_requirement_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins), "a name twice"
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        if requirement.name != PROJECT["name"]:
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.12.9", False),
        ("2.13.0.dev20260501+rocm7.2", True),
        ("2.13.0a0+3c54a27f55.nv26.05", True),
        ("2.13.0rc2", True),
        ("2.13.0+cpu", True),
        ("2.13.1+cu130", True),
        ("2.14.0a0+nv26.07", False),
        ("2.14.0", False),
    ],
)
def test_builds_of_vendors_pass_pip_and_the_launch_scripts(version: str, fits: bool) -> None:
    """pip admits pre-releases where the range itself begins with one."""
    assert (Version(version) in SpecifierSet(torch_range())) is fits
    assert Torch(version, Path("/anywhere")).fits is fits


def test_scripts_take_the_range_of_pythons_from_pyproject() -> None:
    script = (ROOT / "launch/_environment.sh").read_text(encoding="utf-8")
    assert not re.search(r"3\.1\d", script), "no version is written down a second time"
