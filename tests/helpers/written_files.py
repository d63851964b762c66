"""Text files that the package writes: for each of them who writes it, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoConfig

from sdp_deepspeed import folder_lock
from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.checkpoint.interop.describe import describe
from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from sdp_deepspeed.checkpoint.interop.load_universal import universal_tag
from sdp_deepspeed.checkpoint.interop.universal import LATEST_UNIVERSAL, ZERO
from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.storage.folder import find_checkpoint
from sdp_deepspeed.checkpoint.storage.names import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    LATEST,
    MANIFEST,
    MODEL_CONFIG,
    PLAN,
)
from sdp_deepspeed.folder_lock import LOCK, FolderInUseError
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.other_jobs import left_by
from tests.helpers.trained_states import checkpointer_of, one_rank

TAGS = ("step_1", "step_10")  # the first one is what `latest` says when it is cut


@dataclass(frozen=True, eq=False)
class WrittenFile:
    """One of them.

    Args:
        path: below the folder that `write` gets.
        write: makes the file, and what its readers need beside it.
        read: each of them uses the folder; what they return can be compared.
        error: what a reader may raise; (): a cut must not stop it.
    """

    path: str
    write: Callable[[Path], object]
    read: tuple[Callable[[Path], object], ...]
    error: type[Exception] | tuple[()] = ValueError


def _write_plan(folder: Path) -> None:
    one_rank().plan.save(folder / "plan.json")


class _Config:
    """As much of a model's as a checkpoint takes."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "llama", "hidden_size": 64}


def _write_checkpoints(folder: Path) -> None:
    state: Any = one_rank()
    state.module.config = state.module.generation_config = _Config()
    for tag in TAGS:
        state.step()
        checkpointer_of(state).save(folder, tag, {"tag": tag})


def _loaded_tag(folder: Path) -> object:
    """Of the checkpoint that is loaded where none is asked for."""
    _, client_state = checkpointer_of(one_rank()).load(folder, None, LoadOptions())
    return client_state


def _load_newest(folder: Path) -> object:
    return checkpointer_of(one_rank()).load(folder, TAGS[-1], LoadOptions())[1]


def _found_tag(folder: Path) -> object:
    return find_checkpoint(folder).name


def _described(folder: Path) -> object:
    lines, is_complete = describe(folder / TAGS[-1])
    if not is_complete:
        raise ValueError(" ".join(lines))
    return lines[1:]


def _write_export(folder: Path) -> None:
    _write_checkpoints(folder / "checkpoints")
    export(folder / "checkpoints" / TAGS[-1], folder / "hf", ExportFormat(max_shard_bytes=1))


def _load_export(folder: Path) -> object:
    state = one_rank()
    checkpointer_of(state).load_pretrained(folder / "hf")
    return {name: value.tolist() for name, value in state.module.state_dict().items()}


def _hidden_size(folder: Path) -> object:
    return AutoConfig.from_pretrained(folder / "hf").hidden_size


def _write_universal(folder: Path) -> None:
    """As much of it as its `latest` needs."""
    name = f"{TAGS[-1]}_universal"
    (folder / name / ZERO).mkdir(parents=True)
    write_text(folder / LATEST_UNIVERSAL, name)


def _write_lock(folder: Path) -> None:
    left_by(folder)


def _is_refused_while_held(folder: Path) -> bool:
    """By a job that is still there, whatever the lock's file says of it."""
    with (
        (folder / LOCK).open("a") as other,
        mock.patch.object(folder_lock, "_SECONDS_BETWEEN_TRIES", 0),
    ):
        folder_lock.flock(other.fileno())
        with pytest.raises(FolderInUseError, match=str(folder)):
            folder_lock.hold(folder)
    return not folder_lock.is_held_by_others(folder)  # it has left now


_IN_CHECKPOINT = (_loaded_tag, _load_newest, _described)


def _load_plan(folder: Path) -> object:
    return Plan.load(folder / "plan.json")


def _universal(folder: Path) -> object:
    return universal_tag(folder, None)


WRITTEN_FILES: tuple[WrittenFile, ...] = (
    WrittenFile("plan.json", _write_plan, (_load_plan,)),
    *(WrittenFile(f"{TAGS[-1]}/{name}", _write_checkpoints, _IN_CHECKPOINT) for name in (MANIFEST, INDEX)),
    *(  # for people, and vouched for by the manifest
        WrittenFile(f"{TAGS[-1]}/{name}", _write_checkpoints, (_described,))
        for name in (PLAN, CONFIG, MODEL_CONFIG, GENERATION_CONFIG)
    ),
    WrittenFile(LATEST, _write_checkpoints, (_loaded_tag, _found_tag)),
    WrittenFile(LATEST_UNIVERSAL, _write_universal, (_universal,)),
    WrittenFile("hf/config.json", _write_export, (_hidden_size,), OSError),
    WrittenFile("hf/model.safetensors.index.json", _write_export, (_load_export,)),
    WrittenFile(LOCK, _write_lock, (_is_refused_while_held,), error=()),
)
