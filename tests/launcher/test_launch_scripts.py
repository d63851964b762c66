"""What launch/slurm.sbatch and launch/multinode.sh make of their arguments, with programs that only write them down."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

# As Slurm's, for two nodes with two tasks each.
SRUN = """#!/usr/bin/env bash
options=()
while [ "$1" != bash ]; do options+=("$1"); shift; done
printf '%s\\n' "${options[@]}" >"$TOLD/srun"
for task in 0 1 2 3; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) "$@" || exit
done
"""
PYTHON = """#!/usr/bin/env bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $CROSS_RANK $CROSS_SIZE $LOCAL_SIZE $MASTER_ADDR $MASTER_PORT" \
  "$OMP_NUM_THREADS $PYTHONPATH $*" >>"$TOLD/ranks"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node-[7-8]" ] && printf 'node-7\\nnode-8\\n'
"""
JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_CPUS_PER_TASK": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node-[7-8]",
}
# Ranks of a launcher that fails: rank 2 was killed, rank 1 fails first, and rank 0 because of it.
DEEPSPEED = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$TOLD/deepspeed"
while [ "$1" != --enable_each_rank_log ]; do shift; done
echo "starting: everything" >"$2/now_rank0.log"
echo "a word" >"$2/now_rank2.log"
printf '[rank1]: %s\\n' 'Traceback (most recent call last):' '  a line' 'ArithmeticError: on purpose' \\
  >"$2/now_rank1.log"
sleep 0.1
echo "error on rank 0: rank 1 failed" >>"$2/now_rank0.log"
exit 1
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    scripts = {"srun": SRUN, "python": PYTHON, "scontrol": SCONTROL, "deepspeed": DEEPSPEED}
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "TOLD": str(tmp_path), "VIRTUAL_ENV": "/some"}
    own |= {"OMP_NUM_THREADS": "", "PYTHONPATH": "/mine"}
    return {**os.environ, **JOB, **own, "SLURM_SUBMIT_DIR": str(ROOT)}


def start(environment: dict[str, str], script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, cwd=environment["TOLD"], env=environment, capture_output=True, text=True, timeout=60)


def test_slurm_starts_a_rank_in_each_task(environment: dict[str, str], tmp_path: Path) -> None:
    done = start(environment, "slurm.sbatch", "--model", "a b.json", "--run-folder", "run", "--steps", "9")
    assert done.returncode == 0, done.stderr
    ranks = (tmp_path / "ranks").read_text().splitlines()
    same = f"node-7 23456 7 {ROOT}:/mine -u {ROOT}/launch/pretrain.py --model a b.json --run-folder run --steps 9"
    assert ranks == [f"{rank} {rank % 2} 4 {rank // 2} 2 2 {same}" for rank in range(4)]
    options = (tmp_path / "srun").read_text().splitlines()
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=7", "--open-mode=append"} <= set(options)
    assert options[options.index("--output") + 1] == "run/logs/123456_rank%t.log"
    assert (tmp_path / "run" / "logs").is_dir()


@pytest.mark.parametrize(
    ("arguments", "changed", "words"),
    [
        (["--steps", "9"], {}, "--run-folder is missing"),
        (["--run-folder=run"], {"SLURM_SUBMIT_DIR": "/nowhere"}, "/nowhere has no launch/pretrain.py"),
    ],
)
def test_slurm_refuses(environment: dict[str, str], arguments: list[str], changed: dict[str, str], words: str) -> None:
    done = start(environment | changed, "slurm.sbatch", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


HOSTFILE = "# the first is next\n\n10.0.0.7 slots=2\nnode-8 slots=2\n"


def test_multinode_without_ssh_starts_the_launcher_of_this_node(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(HOSTFILE)
    done = start(
        environment, "multinode.sh", "--no_ssh", "--node_rank", "0", "hosts", "--run-folder=my run", "--seed", "1"
    )
    told = (tmp_path / "deepspeed").read_text().splitlines()
    logs = f"{tmp_path}/my run/logs"
    expected = ["--hostfile", "hosts", "--master_addr", "10.0.0.7", "--master_port", "29500", "--no_ssh"]
    expected += ["--node_rank", "0", "--enable_each_rank_log", logs, f"{ROOT}/launch/pretrain.py"]
    assert told == [*expected, "--run-folder=my run", "--seed", "1"]
    assert done.returncode == 1
    assert "starting: everything" in done.stdout, "rank 0's log is shown"
    last = done.stderr[done.stderr.index("error: the run ended with exit code 1") :]
    assert re.findall(r"^== /.*(now_rank\d)\.log\n(.*)", last, re.MULTILINE) == [
        ("now_rank1", "[rank1]: ArithmeticError: on purpose"),
        ("now_rank0", "error on rank 0: rank 1 failed"),
    ], "who failed first comes first"
    assert last.endswith("== no error, as of ranks that were killed: now_rank2.log\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "bash launch/multinode.sh [SWITCHES] HOSTFILE"),
        (["--what", "hosts"], "bash launch/multinode.sh [SWITCHES] HOSTFILE"),
        (["none", "--run-folder", "run"], "none is no hostfile"),
        (["hosts", "--steps", "9"], "--run-folder is missing"),
        (["--no_ssh", "hosts", "--run-folder", "run"], "--no_ssh needs --node_rank"),
        (["hosts", "--run-folder", "run"], "pdsh is missing"),
    ],
)
def test_multinode_refuses(environment: dict[str, str], tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "hosts").write_text(HOSTFILE)
    programs = tmp_path / "bin"
    for tool in ("awk", "bash", "dirname", "sed"):
        (programs / tool).symlink_to(str(shutil.which(tool)))
    done = start(environment | {"PATH": str(programs)}, "multinode.sh", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "deepspeed").exists()
