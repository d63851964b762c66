"""What benchmarks/run.sh makes of its arguments, with programs that only say what they were asked for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

# The last argument but one is --output; the file is what the next start looks for.
MEASURES = 'echo "$*: ${DS_ACCELERATOR:-GPUs}"; while [ "$1" != --output ]; do shift; done; touch "$2"\n'
PYTHON = 'case "$*" in *gpus) echo "$GPUS" ;; -c*) echo 29511 ;; *make.py*) echo "tables: $*" ;; *) '


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("launch", "benchmarks", "elsewhere"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "benchmarks/run.sh", tmp_path / "benchmarks")
    (tmp_path / "launch/_environment.sh").write_text('say() { echo "==> $*"; }\nbuild_cpu_operators() { :; }\n')
    (tmp_path / "deepspeed").write_text(f"#!/bin/bash\n{MEASURES}")
    (tmp_path / "python").write_text(f"#!/bin/bash\n{PYTHON}{MEASURES} ;; esac\n")
    for name in ("python", "deepspeed"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "benchmarks/run.sh"), *arguments],
        cwd=checkout / "elsewhere",
        env={"PATH": f"{checkout}:/usr/bin:/bin", "GPUS": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def measured(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Commands that ran, without what is the same for all."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "--output" in line]
    return [line.replace(" --master_port 29511 --log_level warning", "") for line in lines]


def test_all_of_it_on_the_cpu_goes_on_where_it_was(checkout: Path) -> None:
    done = start(checkout)
    commands = measured(done)
    folder = "--output runs/benchmarks_cpu/unfinished"
    assert [command.partition(" --output")[0] for command in commands] == [
        "--num_gpus 4 benchmarks/side_by_side.py",
        *(f"--num_gpus {number} benchmarks/scaling.py" for number in (1, 2, 4, 8)),
        *(f"benchmarks/growth.py --ranks {number}" for number in (8, 64, 512)),
        "--num_gpus 4 benchmarks/collectives.py",
    ]
    assert commands[0].endswith(f"{folder}_systems_4_ranks.json: cpu")
    assert not list(checkout.glob("runs/benchmarks_cpu/unfinished*"))
    tables = done.stdout.splitlines()[-1]
    assert tables.startswith("tables: benchmarks/tables/make.py runs/benchmarks_cpu/systems_4_ranks.json ")
    assert len(tables.split()) == 2 + len(commands)
    (checkout / "runs/benchmarks_cpu/growth_64_ranks.json").unlink()
    again = start(checkout)
    assert [command.partition(" --output")[0] for command in measured(again)] == ["benchmarks/growth.py --ranks 64"]
    assert "systems_4_ranks is there already; remove runs/benchmarks_cpu/systems_4_ranks.json" in again.stdout
    assert again.stdout.splitlines()[-1] == tables


def test_a_little_of_it_goes_elsewhere(checkout: Path) -> None:
    commands = measured(start(checkout, "--quick", "cpu"))
    assert all("--output runs/benchmarks_cpu_quick/unfinished_" in command for command in commands)
    assert [command.split()[1] for command in commands if "--num_gpus" in command] == ["2", "1", "2", "2"]
    assert "--model tiny" in commands[0]
    assert "--modes forward x block --stages 1" in commands[0]
    own = measured(start(checkout, "--output", "mine", "--quick"))
    assert all(f"--output {checkout}/elsewhere/mine/unfinished_" in command for command in own), (
        "of where it was called"
    )


def test_on_gpus(checkout: Path) -> None:
    """Those that are visible; one of them cannot show what needs several."""
    commands = measured(start(checkout, "gpu", GPUS="2", CUDA_VISIBLE_DEVICES="5,3"))
    where = [command.partition(" benchmarks/")[0] for command in commands]
    both, one = "--include localhost:5,3", "--include localhost:5"
    assert [words for words in where if words.startswith("--")] == [both, one, both, both]
    done = start(checkout, "--output", "one", GPUS="1")
    assert "one GPU: nothing is sent or shared out" in done.stdout
    assert measured(done)[0].startswith("--num_gpus 1 benchmarks/side_by_side.py --model medium")
    devices = {command.split()[command.startswith("--") * 2]: command.rpartition(": ")[2] for command in measured(done)}
    kept = dict.fromkeys(("side_by_side", "scaling", "collectives"), "GPUs") | {"growth": "cpu"}
    assert devices == {f"benchmarks/{name}.py": device for name, device in kept.items()}, "growth measures the host"


def test_figures_of_another_device_or_of_other_settings_are_refused(checkout: Path) -> None:
    """As they are not measured again, their names alone would mix them with these."""
    measured(start(checkout, "cpu", "--quick", "--output", "mine"))
    folder = checkout / "elsewhere/mine"
    for arguments, environment, words in (
        (["cpu"], {}, "has figures of CPU, quick, not of CPU:"),
        (["gpu", "--quick"], {"GPUS": "1"}, "has figures of CPU, quick, not of 29511, quick:"),
    ):
        done = start(checkout, *arguments, "--output", "mine", **environment)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"error: {folder} {words} name another with --output" in done.stderr
        assert "--output" not in done.stdout, "nothing was measured"
    (folder / "settings.txt").unlink()
    done = start(checkout, "cpu", "--quick", "--output", "mine")
    assert (done.returncode, "without the settings.txt" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["tpu"], {}, "run.sh knows no argument tpu"),
        (["cpu", "gpu"], {}, "cpu or gpu, not both"),
        (["--output"], {}, "--output needs a folder"),
        (["--output", "/proc/nothing"], {}, "--output: cannot write to /proc/nothing"),
        (["gpu"], {}, "gpu: there is no GPU that torch can use"),
        (["gpu"], {"GPUS": "2", "CUDA_VISIBLE_DEVICES": "GPU-1"}, "CUDA_VISIBLE_DEVICES is GPU-1"),
    ],
)
def test_refusals_are_one_line(checkout: Path, arguments: list[str], environment: dict[str, str], words: str) -> None:
    done = start(checkout, *arguments, **environment)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "usage: bash benchmarks/run.sh [cpu|gpu] [--quick] [--output FOLDER]" in done.stderr
