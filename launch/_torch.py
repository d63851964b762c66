"""Which torch the environment has, and which one an installation is to use.

A build that the environment brings (a vendor's container, a cluster's module) stays as it is; otherwise constraints.txt
decides. launch/_environment.sh runs this before anything is installed: standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import runpy
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = (ROOT / ".venv").resolve()  # made by the launch scripts; theirs to change


@dataclass(frozen=True)
class Torch:
    """A torch that is installed."""

    version: str  # with everything that a vendor adds: 2.13.0a0+nv26.05
    folder: Path  # site-packages

    @property
    def is_ours(self) -> bool:
        return self.folder.is_relative_to(VENV)

    @property
    def fits(self) -> bool:
        """A pre-release of a minor version counts as that version: vendors build from the branch of the release."""
        lowest, beyond = (_minor(bound) for bound in torch_range().split(","))
        return lowest <= _minor(self.version) < beyond


def find_torch() -> Torch | None:
    """By its metadata, as pip does: an import takes seconds."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Torch(distribution.version, Path(str(distribution.locate_file(""))).resolve())


def torch_range() -> str:
    """What pyproject.toml asks for: `>=A.B,<C.D`, where the lower bound may be a pre-release."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(line for line in dependencies if _name(line) == "torch").removeprefix("torch")


def constraints() -> list[str]:
    """The lines of constraints.txt, with torch pinned to the build that is there, if that one stays.

    Left out: what PIP_CONSTRAINT pins, which vendors' containers set; pip applies both, and they would conflict.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = find_torch()
    if torch and not torch.is_ours and torch.fits:
        lines = [line for line in lines if _name(line) != "torch"] + [f"torch=={torch.version}"]
    elif torch and not torch.is_ours and Path(sys.prefix).resolve() != VENV:
        raise SystemExit(
            f"error: {sys.prefix} has torch {torch.version}, in {torch.folder}; sdp_deepspeed needs "
            f"torch{torch_range()} and does not replace it. Deactivate this environment, then one is made in .venv; "
            "or install such a torch in it yourself"
        )
    pinned = _pinned_by_environment() - {"torch", ""}
    return [line for line in lines if _name(line) not in pinned]


def _pinned_by_environment() -> set[str]:
    files = [Path(name) for name in os.environ.get("PIP_CONSTRAINT", "").split()]
    return {_name(line) for file in files if file.is_file() for line in file.read_text(encoding="utf-8").splitlines()}


def _name(requirement: str) -> str:
    """As package indexes compare names; empty for a comment."""
    match = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _minor(version: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", version)
    assert match, version
    return int(match[1]), int(match[2])


def explain_fit() -> int:
    """Exit status 0 if this Python has a torch that fits; says on stderr why one that is there does not."""
    torch = find_torch()
    if torch and not torch.fits:
        print(f"note: torch {torch.version} in {torch.folder} is not used, torch{torch_range()} is", file=sys.stderr)
    return int(not (torch and torch.fits))


def describe() -> str:
    """One line: Python, torch and where it is from, what it was built for, GPUs. Imports torch."""
    found = find_torch()
    try:
        import torch
    except Exception as error:
        where = f"torch {found.version} in {found.folder}" if found else "torch"
        raise SystemExit(f"error: {where} cannot be imported: {type(error).__name__}: {error}") from error
    builds = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", getattr(torch.version, "xpu", None)))
    built_for = [f"{name} {version}" for name, version in builds if version] or ["CPUs"]
    num_gpus = usable_gpus()
    words = (
        f"Python {platform.python_version()}; torch {torch.__version__} in {Path(torch.__file__).parents[1]}, "
        f"built for {built_for[0]}; {num_gpus or 'no'} GPU{'s' if num_gpus > 1 else ''}"
    )
    # By its path: there may be no package yet, or one without what it depends on.
    reason = runpy.run_path(str(ROOT / "sdp_deepspeed" / "gpus.py"))["unusable_gpus"]()
    return words if reason is None else f"{words}. {reason}"


def usable_gpus() -> int:
    """How many torch can use. Its own count has those, too, whose driver is too old for it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of that driver, which `describe` names
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main(command: str) -> int:
    if command == "fits":
        return explain_fit()
    if command == "gpus":
        print(usable_gpus())
    elif command == "folder":
        found = find_torch()
        print(found.folder if found else "")
    else:
        print(describe() if command == "describe" else "\n".join(constraints()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
