"""Checkpoints that were damaged anywhere: the one before is loaded; never other numbers than were saved."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.load import LoadOptions
from tests.helpers.hostile import refusal_of
from tests.helpers.properties import fuzzed
from tests.helpers.trained_states import checkpointer_of, one_rank
from tests.helpers.training import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is what these tests want
TAGS = ("older", "newer")


@cache
def saved() -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A folder with a checkpoint after the first step and one after the second, and what was saved in each."""
    folder, state, tensors = Path(tempfile.mkdtemp(prefix="sdp-fuzz-")), one_rank(), {}
    for tag in TAGS:
        state.step()
        checkpointer_of(state).save(folder, tag, {"tag": tag})
        tensors[tag] = state.tensors()
    return folder, tensors


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Iterator[None]:
    yield
    shutil.rmtree(saved()[0])
    saved.cache_clear()


def damage(draw: st.DataObject, folder: Path) -> bool:
    """One thing done to one file of the newer checkpoint. Returns whether it is another than before."""
    files = sorted(path for path in (folder / "newer").rglob("*") if path.is_file())
    file = draw.draw(st.sampled_from(files), label="file")
    content, kind = file.read_bytes(), draw.draw(st.sampled_from(KINDS), label="kind")
    position = draw.draw(st.integers(0, max(0, len(content) - 1)), label="position")
    if kind == "cut":
        file.write_bytes(content[:position])
    elif kind == "flip" and content:
        file.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
    elif kind == "more":
        file.write_bytes(content + content[position:] + b"0")
    elif kind == "zeros":
        file.write_bytes(content[:position] + bytes(len(content) - position))
    elif kind == "gone":
        file.unlink()
    elif kind == "older":  # of the same size, and written by nobody else
        other = folder / "older" / file.relative_to(folder / "newer")
        file.write_bytes(other.read_bytes() if other.exists() else b"")
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "device":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif kind == "loop":
        file.unlink()
        file.symlink_to(file.name)
    elif kind == "pipe":
        file.unlink()
        os.mkfifo(file)
    return not file.is_file() or file.read_bytes() != content


KINDS = ["cut", "flip", "more", "zeros", "gone", "older", "folder", "device", "loop", "pipe"]


@contextmanager
def damaged(draw: st.DataObject) -> Iterator[tuple[Path, bool]]:
    """A copy of the folder, and whether its newer checkpoint is another than was saved."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        shutil.copytree(saved()[0], folder)
        yield folder, damage(draw, folder)


@fuzzed()
@given(st.data())
def test_damaged_anywhere(draw: st.DataObject) -> None:
    state = one_rank()
    with damaged(draw) as (folder, is_changed):
        path, client_state = checkpointer_of(state).load(folder, None, LoadOptions())
        tag = "older" if is_changed else "newer"
        assert path == str(folder / tag)
        assert client_state == {"tag": tag}
        assert_identical(state.tensors(), saved()[1][tag])


@fuzzed()
@given(st.data())
def test_asked_for_by_name(draw: st.DataObject) -> None:
    """Then there is no other one to fall back on: all of it, or nothing changes."""
    state = one_rank()
    before = state.tensors()
    with damaged(draw) as (folder, is_changed):
        refusal = refusal_of(lambda: checkpointer_of(state).load(folder, "newer", LoadOptions()))
        assert (refusal is not None) == is_changed
        assert refusal is None or "newer" in refusal
        assert_identical(state.tensors(), before if is_changed else saved()[1]["newer"])
