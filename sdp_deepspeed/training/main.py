"""launch/pretrain.py's program: set up a run, train it, leave the dense model and a report."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from sdp_deepspeed.messages import NEEDS_DEEPSPEED
from sdp_deepspeed.training.fsdp_settings import read_settings
from sdp_deepspeed.training.options import Options, parse_options
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.same_run import check_same_run
from sdp_deepspeed.training.user_errors import exit_on_user_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training program on this rank; returns the exit code (0 also after a stop that was asked for)."""
    with exit_on_user_error():
        options = parse_options(arguments)
        num_ranks = _num_ranks()
        _check_host(options, num_ranks)
        folder = RunFolder(options.run_folder, writes=os.environ["RANK"] == "0")
        config = _resolved(options, num_ranks)
        changed_layout = check_same_run(folder, config)
        if _is_finished(folder, options.steps):
            if folder.writes:
                print(f"{folder.path} has its {options.steps} steps already; remove it to train again", flush=True)
            return 0
    # Heavy imports only now: a typo on the command line is answered at once.
    from sdp_deepspeed.training.session import run_session

    if changed_layout and folder.writes:
        rows = ", ".join(f"{path} {then!r} -> {now!r}" for path, (then, now) in changed_layout.items())
        print(f"the run in {folder.path} goes on with another layout: {rows}", flush=True)
    return run_session(options, folder, config)


def _num_ranks() -> int:
    if "RANK" not in os.environ:
        raise ValueError(
            "start this with the launcher: deepspeed --num_gpus <ranks> launch/pretrain.py ..., or torchrun "
            "--nproc-per-node <ranks> launch/pretrain.py ..."
        )
    return int(os.environ["WORLD_SIZE"])


def _check_host(options: Options, num_ranks: int) -> None:
    """ValueError for a host that is not there, or that cannot do what the config asks for."""
    if options.host == "fsdp2":
        read_settings(options.deepspeed_config, num_ranks)
    elif importlib.util.find_spec("deepspeed") is None:
        raise ValueError(f"--host deepspeed {NEEDS_DEEPSPEED}, or take --host fsdp2")


def _resolved(options: Options, num_ranks: int) -> dict[str, object]:
    """What config.json holds: everything that decides the run."""
    return {name: value for name, value in vars(options).items() if name != "run_folder"} | {"num_ranks": num_ranks}


def _is_finished(folder: RunFolder, steps: int) -> bool:
    report = folder.read_json("report.json")
    if report is None:
        return False
    done = report.get("steps")
    if not isinstance(done, int):
        raise ValueError(
            f"{folder.path}: report.json has no number of steps: remove it, or choose another --run-folder"
        )
    return done >= steps
