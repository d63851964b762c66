"""Checkpoints of a team's engine: DeepSpeed's own, in a folder for each team, with the team's state beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.checkpoint import atomic_folder
from sdp_deepspeed.checkpoint.files import CHECKSUMS
from sdp_deepspeed.parallel.consistency import gather_objects, raise_on_all_ranks, run_on_all_ranks
from sdp_deepspeed.teams.team import Team

_STEPS = "engine_steps"  # of DeepSpeed's engine, in the state


@contextmanager
def written_together(
    engine: DeepSpeedEngine, team: Team, folder: Path, tag: str, *, latest: bool, control: dist.ProcessGroup
) -> Iterator[None]:
    """Context in which DeepSpeed writes a checkpoint, with the team's state before and `latest` after it. Collective.

    Raises:
        OSError, RuntimeError: on all ranks, the error of one that cannot write. `latest` is as before.
    """
    errors: list[Exception] = []

    def noted(write: Callable[..., Any]) -> Callable[..., None]:
        def write_or_note(*arguments: Any, **options: Any) -> None:
            try:
                write(*arguments, **options)
            except Exception as error:  # other ranks wait in a barrier
                errors.append(error)

        return write_or_note

    def write_state() -> None:
        Path(folder, tag).mkdir(parents=True, exist_ok=True)
        torch.save({**team.state_dict(), _STEPS: engine.global_steps}, _state_file(folder / tag))

    run_on_all_ranks(write_state, control)
    host: Any = engine
    host.checkpoint_engine.save = noted(host.checkpoint_engine.save)
    host._copy_recovery_script = noted(host._copy_recovery_script)
    try:
        yield
    finally:
        del host.checkpoint_engine.save, host._copy_recovery_script
    raise_on_all_ranks(next(iter(errors), None), control)
    if latest:
        is_first = dist.get_rank() == 0
        run_on_all_ranks(lambda: write_text(folder / atomic_folder.LATEST, tag) if is_first else None, control)


def refuse_whole(folder: Path, tag: str | None) -> None:
    """Raise ValueError for a checkpoint of an engine without teams, which has the dense model.

    Args:
        tag: name of the checkpoint. Default: the one in `latest`.
    """
    name = next(iter(atomic_folder.tags_to_try(folder)), None) if tag is None else tag
    if name is not None and (folder / name / CHECKSUMS).exists():
        raise ValueError(
            f"{folder / name} is a checkpoint of the dense model, without teams; run `sdp checkpoint export {folder} "
            f"OUT --tag {name}`, and start teams with that model"
        )


def load_state(team: Team, folder: Path, num_steps: int | None, control: dist.ProcessGroup) -> None:
    """Load the team's state on all ranks, or, if it is damaged on one of them, on none. Collective.

    Args:
        folder: of the checkpoint.
        num_steps: of the weights, since a save under a tag that existed may have been cut off; None if unknown.
    """
    file, problem = _state_file(folder), ""
    refused: ValueError | None = None
    try:
        state = torch.load(file, map_location="cpu")
    except Exception as error:  # of many kinds
        problem = _describe(file, error)
    else:
        try:
            if num_steps not in (None, state.get(_STEPS, num_steps)):
                raise RuntimeError(f"it is of step {state[_STEPS]}, the weights of step {num_steps}")
            team.load_state_dict(state)
        except ValueError as error:
            refused = error
        except (KeyError, RuntimeError, TypeError) as error:
            problem = _describe(file, error)
    raise_on_all_ranks(refused, control)
    if problem := next(filter(None, gather_objects(problem, control)), ""):
        team.drop_state(problem)


def _describe(file: Path, error: Exception) -> str:
    first, *_ = f"{error}".splitlines() or [""]
    return f"{file}: {type(error).__name__}: {first}"


def _state_file(folder: Path) -> Path:
    return folder / f"team_rank_{dist.get_rank()}.pt"
