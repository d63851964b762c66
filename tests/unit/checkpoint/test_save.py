"""Saving behind the training, on one rank and without an engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.state.host_copy import Arrivals
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.manifest import HashedFile
from tests.helpers.trained_states import Trained, checkpointer_of, names_in, one_rank
from tests.helpers.training import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is what these tests want
ALL = LoadOptions()


def trained() -> Trained:
    state = one_rank()
    for _ in range(2):
        state.step()
    return state


def test_saving_behind_the_training(tmp_path: Path) -> None:
    """What was there at the call is saved; an error is raised by the next call, and then it is told."""
    state = trained()
    checkpointer, before = checkpointer_of(state, asynchronous=True), state.tensors()
    checkpointer.save(tmp_path, None, {})
    state.step()
    checkpointer.wait()
    checkpointer.load(tmp_path, None, ALL)
    assert_identical(state.tensors(), before)
    (tmp_path / "file").touch()
    checkpointer.save(tmp_path / "file", None, {})
    with pytest.raises(RuntimeError, match=r"checkpoint: (Not a directory|File exists)"):
        checkpointer.save(tmp_path, "next", {})
    checkpointer.save(tmp_path, "next", {})
    checkpointer.wait()
    assert names_in(tmp_path) == ["file", "global_step2", "latest", "next"]


def test_a_load_waits_for_what_is_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, loaded, publish = trained(), threading.Event(), files.publish

    def slowly(*arguments: Any, **options: Any) -> None:
        loaded.wait(0.3)
        publish(*arguments, **options)

    monkeypatch.setattr(files, "publish", slowly)
    checkpointer, before = checkpointer_of(state, asynchronous=True), state.tensors()
    checkpointer.save(tmp_path, "tag", {})
    state.step()
    path, _ = checkpointer.load(tmp_path, None, ALL)
    loaded.set()
    checkpointer.wait()
    assert path == str(tmp_path / "tag")
    assert_identical(state.tensors(), before)


def test_writing_begins_while_the_rest_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, begun, seen = trained(), threading.Event(), list[bool]()
    write, reach = HashedFile.write, Arrivals.reach

    def written(file: HashedFile, data: bytes | memoryview) -> None:
        write(file, data)
        begun.set()

    def reached(arrivals: Arrivals, num_bytes: int) -> None:
        reach(arrivals, num_bytes)
        seen.append(begun.wait(240 if all(seen) else 0))

    monkeypatch.setattr(HashedFile, "write", written)
    monkeypatch.setattr(Arrivals, "reach", reached)
    checkpointer_of(state, asynchronous=True).save(tmp_path, None, {})
    assert seen
    assert all(seen)


def test_a_copy_that_fails_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    state = trained()
    checkpointer = checkpointer_of(state, asynchronous=True)
    checkpointer.save(tmp_path, "good", {})
    with mock.patch.object(Arrivals, "reach", side_effect=MemoryError("no room")):
        checkpointer.save(tmp_path, "bad", {})
    with pytest.raises(RuntimeError, match=r"it could not be copied to host memory.*no room"):
        checkpointer.wait()
    assert names_in(tmp_path) == ["good", "latest"]
    checkpointer.save(tmp_path, "next", {})
    checkpointer.wait()
    assert names_in(tmp_path) == ["good", "latest", "next"]


def test_two_engines_of_one_process_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second would remove what the first is writing behind the training."""
    publishing, opened, overtaken = threading.Event(), threading.Event(), list[bool]()
    publish, open_staging = files.publish, files.open_staging

    def slowly(folder: Path, tag: str, *arguments: Any, **options: Any) -> None:
        if tag == "behind":
            publishing.set()
            overtaken.append(opened.wait(0.1))
        publish(folder, tag, *arguments, **options)

    def seen(folder: Path, tag: str) -> Path:
        if tag == "other":
            opened.set()
        return open_staging(folder, tag)

    monkeypatch.setattr(files, "publish", slowly)
    monkeypatch.setattr(files, "open_staging", seen)
    behind = checkpointer_of(trained(), asynchronous=True)
    behind.save(tmp_path, "behind", {})
    assert publishing.wait(240)
    checkpointer_of(trained()).save(tmp_path, "other", {})
    behind.wait()
    assert overtaken == [False]
    assert names_in(tmp_path) == ["behind", "latest", "other"]
