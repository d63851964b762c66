"""Commands as their users type them: what needs an interpreter of its own."""

from __future__ import annotations

import sys

from sdp_deepspeed.version import __version__
from tests.helpers.programs import ended

HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "datasets", "numpy", "pandas", "matplotlib"}


def test_the_quickstart_takes_overrides_only() -> None:
    result = ended(["bash", "launch/quickstart.sh", "test"], code=2)
    assert result.stderr.startswith("error: quickstart.sh takes key=value overrides of the recipe, got: test;")
    assert not result.stdout


def heavy_modules_of(*arguments: str) -> set[str]:
    """Which packages that are slow to import one command imports."""
    script = (
        "import sys\nfrom sdp_deepspeed.cli import main\n"
        "code = main(sys.argv[1:])\n"
        f"print('imported:', *sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)\nsys.exit(code)"
    )
    return set(ended([sys.executable, "-c", script, *arguments]).stderr.splitlines()[-1].split()[1:])


def test_help_and_mistakes_import_nothing_heavy() -> None:
    for arguments in (["--help"], ["estimate", "--help"], ["checkpoint", "export", "--help"], ["--version"]):
        assert heavy_modules_of(*arguments) == set(), arguments


def test_the_package_is_a_command() -> None:
    command = [sys.executable, "-m", "sdp_deepspeed"]
    done = ended([*command, "--version"])
    assert (done.stdout, done.stderr) == (f"sdp_deepspeed {__version__}\n", "")
    done = ended([*command, "estimat"], code=2)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
