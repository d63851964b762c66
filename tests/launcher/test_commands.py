"""Commands as their users type them: what needs an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.repository import ROOT

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy", "pydantic"}


def test_the_quickstart_takes_no_arguments() -> None:
    result = subprocess.run(
        ["bash", "launch/quickstart.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=600
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()[1:])


def test_what_needs_no_tensors_imports_nothing_heavy() -> None:
    for arguments in (["--help"], ["estimate"]):
        assert heavy_modules_of(*arguments) == set(), arguments


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdp_deepspeed", "estimate"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 ranks, C = 0.5, forward regime, bf16, 1 micro-steps\n")
    assert not done.stderr
