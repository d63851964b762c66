"""Damage, disks that fail, ranks that do something else: an error on all ranks, and nothing is lost."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.checkpoint import files
from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from tests.helpers.core_training import Layout, Training, training
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, refusal

pytestmark = pytest.mark.world(2)

LARGEST = 2**15  # bytes of a file: tensors have more, all others less


def test_damaged_files_are_refused(rank: Rank) -> None:
    """Each file in turn is cut short, changed in one bit, deleted: it is named, or the checkpoint before is loaded."""
    manager, folder = Checkpointer(), rank.folder
    with training(Layout(2)) as run:
        states = {}
        for tag in ("older", "newer"):
            run.train(1)
            manager.save(folder, tag, run.state, {})
            states[tag] = run.tensors()
        names = sorted(path.name for path in (folder / "newer").iterdir())
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]
        for name in names:
            for damage in (_cut, _flip, Path.unlink):
                with _damaged(rank, folder / "newer" / name, damage):
                    load = partial(manager.load, folder, "newer", run.state)
                    refusal(ValueError, load, "no complete checkpoint 'newer'", name)
                    assert_identical(run.tensors(), states["newer"])
                    loaded = manager.load(folder, None, run.state)
                    assert loaded is not None
                    assert loaded.path == folder / "older"
                    assert_identical(run.tensors(), states["older"])
                manager.load(folder, None, run.state)
                assert_identical(run.tensors(), states["newer"])
        for damage in (lambda path: path.write_text("lost"), Path.unlink):
            with _damaged(rank, folder / "latest", damage):
                loaded = manager.load(folder, None, run.state)
                assert loaded is not None
                assert loaded.path == folder / "newer"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def _damaged(rank: Rank, path: Path, damage: Callable[[Path], Any]) -> Iterator[None]:
    content = path.read_bytes()
    dist.barrier()
    if rank.rank == 0:
        damage(path)
    dist.barrier()
    yield
    dist.barrier()
    if rank.rank == 0:
        path.write_bytes(content)
    dist.barrier()


def test_files_may_not_grow(rank: Rank) -> None:
    """A limit of the system on one rank, which fails as a full disk does: in the middle of a file."""
    for asynchronous in (False, True):
        manager, folder = Checkpointer(asynchronous=asynchronous), rank.folder / str(asynchronous)
        with training(Layout(2)) as run:
            manager.save(folder, "good", run.state, {})
            manager.wait()
            good = run.tensors()
            run.train(1)
            for failing in range(rank.size):
                with _limited(LARGEST if rank.rank == failing else resource.RLIM_INFINITY):
                    for tag in ("good", "next"):
                        save = partial(save_and_wait, manager, folder, tag, run)
                        words = (f"rank {failing}: [Errno 27] File too large", f"__{failing}_0.distcp")
                        refusal(RuntimeError, save, "was not saved", *words)
            assert_loaded(manager, folder, "good", run)
            assert_identical(run.tensors(), good | {k: v for k, v in run.tensors().items() if k not in good})
            run.train(1)
            manager.save(folder, "next", run.state, {})
            assert_loaded(manager, folder, "next", run)
        manager.close()
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "README.txt", "good", "latest", "next"]


def save_and_wait(manager: Checkpointer, folder: Path, tag: str, run: Training) -> None:
    manager.save(folder, tag, run.state, {})
    manager.wait()


def assert_loaded(manager: Checkpointer, folder: Path, tag: str, run: Training) -> None:
    loaded = manager.load(folder, None, run.state)
    assert loaded is not None
    assert loaded.path == folder / tag


@contextmanager
def _limited(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_one_rank_cannot_do(rank: Rank) -> None:
    """An error on all: to look for checkpoints, to read one, to finish one, to describe its state."""
    manager = Checkpointer()
    with training(Layout(2)) as run:
        manager.save(rank.folder, "tag", run.state, {})
        load = partial(manager.load, rank.folder, "tag", run.state)
        save = partial(manager.save, rank.folder, "tag", run.state, {})
        for name, failing, call in (
            ("sdp_deepspeed.checkpoint.files.Reader.read", 1, load),
            ("sdp_deepspeed.checkpoint.files.publish", 0, save),
            ("sdp_deepspeed.checkpoint.checkpointer.written_state", 1, save),
            ("sdp_deepspeed.checkpoint.files.Writer.write_data", 1, save),
        ):
            with mock.patch(name, side_effect=OSError(5, "Input/output error")) if rank.rank == failing else _nothing():
                refusal((RuntimeError, OSError), call, "Input/output error", f"rank {failing}")
        load()
        (rank.folder / "file").write_text("")
        call = partial(manager.save, rank.folder / "file" / "x", "tag", run.state, {})
        refusal(RuntimeError, call, "Not a directory")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_calls_that_differ(rank: Rank) -> None:
    manager = Checkpointer()
    with training(Layout(2)) as run:

        def save(tag: str, common: Any) -> None:
            manager.save(rank.folder, tag, run.state, common)

        def load(tag: str | None) -> Any:
            return manager.load(rank.folder, tag, run.state)

        refusal(
            ValueError, lambda: save(f"of_{rank.rank}", {}), "rank 0 called save 'of_0'", "rank 1 called save 'of_1'"
        )
        refusal(
            ValueError,
            lambda: load("a") if rank.rank else save("a", {}),
            "rank 0 called save 'a'",
            "rank 1 called load 'a'",
        )
        refusal(ValueError, lambda: save("a/b", {}), "expected the name of a folder")
        assert load(None) is None
        refusal(ValueError, lambda: load("lost"), "no complete checkpoint 'lost'")
        for strange in (nn.Linear(1, 1), Path("x"), lambda: None):
            refusal(ValueError, partial(save, "a", {"strange": strange if rank.rank == 0 else 1}), "tensors, numbers")
        assert not list(rank.folder.glob("*/.metadata"))
        plain: dict[str, Any] = {"t": torch.arange(3), "nested": [1, {"a": None, "b": (2.5, True)}]}
        save("a", plain)
        loaded = load("a")
        assert loaded is not None
        assert torch.equal(loaded.common.pop("t"), plain.pop("t"))
        assert loaded.common == plain


def test_one_job_in_a_folder(rank: Rank) -> None:
    """Of another process: here one that the folder's lock is not told of."""
    with training(Layout(2)) as run:
        manager = Checkpointer()
        manager.save(rank.folder, "tag", run.state, {})
        if rank.rank == 0:
            files.filelock.FileLock._instances.clear()
        other = Checkpointer()
        refusal(ValueError, lambda: other.save(rank.folder, "tag", run.state, {}), "another job writes checkpoints")
        assert other.load(rank.folder, None, run.state) is not None
        manager.close()
        other.save(rank.folder, "tag", run.state, {})
        other.close()
