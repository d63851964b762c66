"""launch/pretrain.py's program: set up a run, train it, leave the dense model and a report. With another task it is
launch/train_vision.py's."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from sdp_deepspeed.messages import NEEDS_DEEPSPEED
from sdp_deepspeed.training.fsdp_settings import read_settings
from sdp_deepspeed.training.options import Options, parse_options
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.same_run import check_same_run
from sdp_deepspeed.training.user_errors import exit_on_user_error

if TYPE_CHECKING:
    from sdp_deepspeed.training.task import Task

_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Pre-train on text, on this rank; returns the exit code (0 also after a stop that was asked for)."""
    return run_program("pretrain.py", lambda: parse_options(arguments), _text_task)


def _text_task(options: Options) -> Task:
    from sdp_deepspeed.training.text_task import TextTask

    return TextTask(options)


def run_program(
    name: str,
    parse: Callable[[], _AnyOptions],
    task_of: Callable[[_AnyOptions], Task],
    settle: Callable[[_AnyOptions, int], _AnyOptions] = lambda options, _: options,
) -> int:
    """Run the training program on this rank; returns the exit code.

    Args:
        name: of the script, for messages.
        parse: the command line. Like `settle` it raises ValueError or OSError for whatever the user got wrong.
        task_of: what the options train; called when heavy imports may happen.
        settle: options and number of ranks to options in which nothing is left open.
    """
    with exit_on_user_error():
        options = parse()
        num_ranks = _num_ranks(name)
        options = settle(options, num_ranks)
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
    return run_session(options, folder, config, task_of(options))


def _num_ranks(name: str) -> int:
    if "RANK" not in os.environ:
        raise ValueError(
            f"start this with the launcher: deepspeed --num_gpus <ranks> launch/{name} ..., or torchrun "
            f"--nproc-per-node <ranks> launch/{name} ..."
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
    names = (field.name for field in dataclasses.fields(options) if field.name != "run_folder")
    return {name: getattr(options, name) for name in names} | {"num_ranks": num_ranks}


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
