"""Where a figure comes from: of uncommitted changes those of figures do not count."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.common import provenance as module
from benchmarks.common.provenance import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("benchmarks/common/provenance.py", "benchmarks/results/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "benchmarks/common/provenance.py"))
    return tmp_path


def test_changed_results_leave_a_tree_clean(checkout: Path) -> None:
    """What wrote the first of several results is what writes the second."""
    (checkout / "benchmarks/results/a.json").write_text("2\n")
    (checkout / "new.txt").write_text("not known to git\n")
    found = provenance()
    assert (found["dirty"], len(str(found["commit"]))) == (False, 40)


def test_changed_code_does_not(checkout: Path) -> None:
    (checkout / "benchmarks/common/provenance.py").write_text("2\n")
    assert provenance()["dirty"] is True


def test_code_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)
