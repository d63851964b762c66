"""launch/_environment.sh: which Python and which torch it takes. Nothing is installed: pip is a stub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

VENDOR = "2.13.0a0+3c54a27f55.nv26.05"
OF_THE_PACKAGE = ["sdp_deepspeed/version.py", "sdp_deepspeed/gpus.py"]
FILES = ["pyproject.toml", "setup.cfg", "constraints.txt", "README.md", *OF_THE_PACKAGE]

# A machine's own Python, whose packages lie in $SITE. An environment that it makes gets PIP below.
SYSTEM_PYTHON = """#!/bin/bash
[ "$1 $2" = "-m venv" ] || PYTHONPATH="$SITE" exec "$REAL" "$@"
echo "$*" >>"$LOG"
"$REAL" -m venv --without-pip .venv
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$packages/pip"
cp "$PIP" "$packages/pip/__main__.py"
if [ "$3" = --system-site-packages ] && [ -z "${NESTED:-}" ]; then echo "$SITE" >"$packages/system.pth"; fi
"""

# Records what it is asked for, and copies the torch of $INDEX.
PIP = """
import os, pathlib, shutil, sys
with open(os.environ["LOG"], "a") as log:
    print(*sys.argv[4:], file=log)
pathlib.Path(sys.prefix, "bin/deepspeed").touch(mode=0o755)
if "torch" in sys.argv:
    shutil.copytree(os.environ["INDEX"], pathlib.Path(__file__).parents[1], dirs_exist_ok=True)
"""

TORCH = """
__version__ = {version!r}
class version: cuda, hip = "13.1", None
class cuda:
    device_count = staticmethod(lambda: 8)
    is_available = staticmethod(lambda: {has_gpu})
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that an installation reads, in a folder of their own."""
    for name in [*FILES, "launch/_environment.sh", "launch/_torch.py"]:
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


def make_torch(site: Path, version: str, *, has_gpu: bool = True) -> None:
    (site / f"torch-{version}.dist-info").mkdir(parents=True)
    (site / f"torch-{version}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(TORCH.format(version=version, has_gpu=has_gpu))


def make_venv(folder: Path, version: str = "") -> Path:
    """An empty environment, or one with a torch; its interpreter."""
    venv.create(folder, symlinks=True)
    if version:
        make_torch(Path(sysconfig.get_path("purelib", vars={"base": str(folder)})), version)
    return folder / "bin/python"


def ask(python: Path, checkout: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(python), str(checkout / "launch/_torch.py"), command]
    without = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    return subprocess.run(arguments, env=without | environment, capture_output=True, text=True, timeout=60)


def source_script(checkout: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Source the script where every Python is the stub; what it said, and what venv and pip were asked for."""
    machine = checkout.parent
    (machine / "bin").mkdir(exist_ok=True)
    for name in ["python", "python3", *(f"python3.{minor}" for minor in range(11, 30))]:
        (machine / "bin" / name).write_text(SYSTEM_PYTHON)
        (machine / "bin" / name).chmod(0o755)
    (machine / "pip.py").write_text(PIP)
    settings = {"PATH": f"{machine / 'bin'}:/usr/bin:/bin", "SITE": str(machine / "site"), "LOG": str(machine / "log")}
    settings |= {
        "REAL": str(make_venv(machine / "real")),
        "PIP": str(machine / "pip.py"),
        "INDEX": str(machine / "index"),
    }
    script = ["bash", "-c", 'set -euo pipefail; source launch/_environment.sh ""']
    result = subprocess.run(
        script, cwd=checkout, env=settings | environment, capture_output=True, text=True, timeout=120
    )
    log = machine / "log"
    return result, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("nested", ["", "a machine's Python is an environment itself"])
def test_torch_of_the_system_is_used_as_it_is(checkout: Path, nested: str) -> None:
    site = checkout.parent / "site"
    make_torch(site, VENDOR)
    result, asked = source_script(checkout, NESTED=nested)
    assert result.returncode == 0, result.stderr
    constraints = checkout / ".venv/.sdp_deepspeed-constraints.txt"
    assert asked == ["-m venv --system-site-packages .venv", f"--constraint {constraints} --editable .[deepspeed]"]
    assert f"torch=={VENDOR}" in constraints.read_text().splitlines()
    assert f"torch {VENDOR} is here and stays as it is" in result.stdout
    assert f"torch {VENDOR} in {site}, built for CUDA 13.1; 8 GPUs" in result.stdout.splitlines()[-1]
    again, asked_again = source_script(checkout)
    assert asked_again == asked
    assert "sdp_deepspeed is already installed" in again.stdout


@pytest.mark.parametrize("version", ["", "2.12.0+cu129"])
def test_a_system_without_a_torch_that_fits_gets_one_in_an_environment_of_its_own(checkout: Path, version: str) -> None:
    site = checkout.parent / "site"
    if version:
        make_torch(site, version)
    make_torch(checkout.parent / "index", "2.13.0+cu130")
    result, asked = source_script(checkout)
    assert result.returncode == 0, result.stderr
    assert (f"note: torch {version} in {site} is not used" in result.stderr) is bool(version)
    constraints = checkout / ".venv/.sdp_deepspeed-constraints.txt"
    assert asked == [
        "-m venv .venv",
        *(f"--constraint {constraints} {what}" for what in ("torch", "--editable .[deepspeed]")),
    ]
    assert constraints.read_text() == (checkout / "constraints.txt").read_text()
    assert f"torch 2.13.0+cu130 in {checkout / '.venv'}" in result.stdout.splitlines()[-1]
    assert source_script(checkout)[1] == asked, "a second time installs nothing"


def test_an_unsupported_python_is_refused_with_what_is_needed(checkout: Path) -> None:
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace(">=3.11,<3.15", ">=3.98,<3.100"))
    result, asked = source_script(checkout)
    assert result.returncode == 1
    assert not asked
    assert "error: Python 3.98 to 3.99 is needed and none is on PATH" in result.stderr
    result, asked = source_script(checkout, VIRTUAL_ENV="/elsewhere")
    assert result.returncode == 1
    assert not asked
    assert "error: Python 3.98 to 3.99 is needed and the environment has Python 3." in result.stderr


def test_what_is_missing_to_compile_is_named(checkout: Path) -> None:
    make_torch(checkout.parent / "site", VENDOR, has_gpu=False)
    result, _ = source_script(checkout, CXX="/nowhere/c++")
    assert result.returncode == 1
    assert "DeepSpeed needs a C++ compiler and Python's headers; install them (Debian, Ubuntu: g++" in result.stderr
    assert not list((checkout / ".venv").glob(".sdp_deepspeed-deepspeed")), "the next time goes on"


@pytest.mark.parametrize(("minutes", "stays"), [(1, True), (30, False)])
def test_the_lock_of_a_build_that_was_killed_is_removed(checkout: Path, minutes: int, stays: bool) -> None:
    make_torch(checkout.parent / "site", VENDOR, has_gpu=False)
    lock = checkout.parent / "extensions/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 60 * minutes,) * 2)
    result, _ = source_script(checkout, CXX="bash", TORCH_EXTENSIONS_DIR=str(checkout.parent / "extensions"))
    assert "building DeepSpeed's communication operator" in result.stdout, result.stderr
    assert lock.exists() is stays


def test_an_environment_keeps_its_own_torch(checkout: Path) -> None:
    python = make_venv(checkout.parent / "theirs", VENDOR)
    lines = ask(python, checkout, "constraints").stdout.splitlines()
    assert [line for line in lines if line.startswith("torch")] == [f"torch=={VENDOR}"]
    pinned = checkout / "vendor.txt"
    pinned.write_text("# vendor's\nnumpy==2.1.0\nHuggingFace.Hub==2.0\ntorch==2.13.0a0\n")
    fewer = ask(python, checkout, "constraints", PIP_CONSTRAINT=f"/nowhere.txt {pinned}").stdout.splitlines()
    assert {line.split("==")[0] for line in set(lines) - set(fewer)} == {"numpy", "huggingface_hub"}


def test_an_environment_with_another_torch_is_refused_and_left_alone(checkout: Path) -> None:
    python = make_venv(checkout.parent / "theirs", "2.12.0+cu129")
    result = ask(python, checkout, "constraints")
    assert result.returncode == 1
    assert not result.stdout
    assert "has torch 2.12.0+cu129" in result.stderr
    assert "Deactivate this environment" in result.stderr


@pytest.mark.parametrize("version", ["", "2.12.0", "2.13.1"])
def test_torch_of_our_own_environment_follows_the_constraints(checkout: Path, version: str) -> None:
    python = make_venv(checkout / ".venv", version)
    assert ask(python, checkout, "constraints").stdout == (ROOT / "constraints.txt").read_text()


def test_a_torch_that_cannot_be_imported_is_named(checkout: Path) -> None:
    python = make_venv(checkout / ".venv", "2.13.0")
    broken = next((checkout / ".venv").rglob("torch/__init__.py"))
    broken.write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    result = ask(python, checkout, "describe")
    assert result.returncode == 1
    assert "error: torch 2.13.0 in " in result.stderr
    assert "cannot be imported: OSError: libcudart.so.13" in result.stderr


def stubbed_quickstart(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The environment, Python and the launcher are stubs."""
    (folder / "launch").mkdir()
    shutil.copy(ROOT / "launch/quickstart.sh", folder / "launch")
    stub = 'say() { echo "==> $*"; }\nbuild_cpu_operator() { echo "builds $1"; }\n'
    (folder / "launch/_environment.sh").write_text(stub)
    (folder / "python").write_text('#!/bin/bash\nif [ "$2" = gpus ]; then echo "$GPUS"; else echo 1; fi\n')
    (folder / "deepspeed").write_text('#!/bin/bash\necho "trains on ${DS_ACCELERATOR:-GPUs}: $1 $2"\n')
    for name in ("python", "deepspeed"):
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(folder / "launch/quickstart.sh")],
        env={"PATH": f"{folder}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("gpus", "asked", "says", "device"),
    [
        (0, "", "4 workers; no GPU that torch can use: all of them run on the CPU", "cpu"),
        (1, "", "4 workers; 1 GPU, and each worker would need its own: all of them run on the CPU", "cpu"),
        (3, "", "4 workers; 3 GPUs, and each worker would need its own: all of them run on the CPU", "cpu"),
        (4, "", "4 workers, 4 GPUs: each worker runs on its own", ""),
        (8, "cpu", "4 workers; DS_ACCELERATOR=cpu: all of them run on the CPU", "cpu"),
    ],
)
def test_the_quickstart_does_what_it_says(tmp_path: Path, gpus: int, asked: str, says: str, device: str) -> None:
    """On any number of GPUs."""
    done = stubbed_quickstart(tmp_path, GPUS=str(gpus), **({"DS_ACCELERATOR": asked} if asked else {}))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"==> {says}" in lines
    assert lines.count(f"trains on {device or 'GPUs'}: --num_gpus 4") == 2
    assert ("builds ShareMemCommBuilder" in lines) == (gpus > 0 and device == "cpu")


def test_the_quickstart_takes_the_gpus_that_are_visible(tmp_path: Path) -> None:
    """With `--num_gpus` DeepSpeed's launcher would take the machine's first ones, which may be somebody else's."""
    done = stubbed_quickstart(tmp_path, GPUS="5", CUDA_VISIBLE_DEVICES="3,7,4,5,6")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("trains on GPUs: --include localhost:3,7,4,5") == 2


def test_the_quickstart_names_what_the_launcher_cannot_take(tmp_path: Path) -> None:
    done = stubbed_quickstart(tmp_path, GPUS="4", CUDA_VISIBLE_DEVICES="GPU-1,GPU-2,GPU-3,GPU-4")
    assert done.returncode == 2
    assert "error: CUDA_VISIBLE_DEVICES is GPU-1,GPU-2,GPU-3,GPU-4; DeepSpeed's launcher takes numbers" in done.stderr


def test_a_driver_that_is_too_old_counts_no_gpus(checkout: Path) -> None:
    """Torch's own count takes them from the driver, and each worker would have failed on one."""
    python = make_venv(checkout / ".venv")
    make_torch(Path(sysconfig.get_path("purelib", vars={"base": str(checkout / ".venv")})), VENDOR, has_gpu=False)
    assert ask(python, checkout, "gpus").stdout == "0\n"
    assert "built for CUDA 13.1; no GPU" in ask(python, checkout, "describe").stdout
