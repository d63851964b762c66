"""Damage, disks that fail, ranks that do something else: an error on all ranks, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.checkpoint import atomic_folder, files
from tests.helpers.checkpointed_runs import names_in, settings_of, stepped
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, engine_of, refusal, train

pytestmark = pytest.mark.world(2)


def test_damaged_files_are_refused(rank: Rank) -> None:
    """Each file in turn is cut short, changed in one bit, deleted: it is named, or the checkpoint before is loaded."""
    folder, engine, states = rank.folder, engine_of(settings_of()), dict[str, Any]()
    for tag in ("older", "newer"):
        train(engine, num_steps=1)
        engine.save_checkpoint(str(folder), tag)
        states[tag] = stepped(engine)
    names = sorted(path.name for path in (folder / "newer").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]
    for name in names:
        for damage in (_cut, _flip, Path.unlink):
            with _damaged(rank, folder / "newer" / name, damage):
                load = partial(engine.load_checkpoint, str(folder), tag="newer")
                refusal(ValueError, load, "no complete checkpoint 'newer'", name)
                assert_identical(stepped(engine), states["newer"])
                assert engine.load_checkpoint(str(folder))[0] == str(folder / "older")
                assert_identical(stepped(engine), states["older"])
            engine.load_checkpoint(str(folder))
            assert_identical(stepped(engine), states["newer"])
    for damage in (lambda path: path.write_text("lost"), Path.unlink):
        with _damaged(rank, folder / "latest", damage):
            assert engine.load_checkpoint(str(folder))[0] == str(folder / "newer")


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


def test_a_disk_is_full(rank: Rank) -> None:
    """A full disk on one rank; how it is named is in the unit tests of files."""
    write_data = files.Writer.write_data

    def fails(writer: files.Writer, *arguments: Any) -> None:
        write_data(writer, *arguments)
        raise OSError(28, "No space left on device")

    for asynchronous in (False, True):
        folder = rank.folder / str(asynchronous)
        engine = engine_of(settings_of(checkpoint={"asynchronous": asynchronous}))
        train(engine, num_steps=1)  # so that there are moments

        def save(tag: str, engine: Any = engine, folder: Path = folder) -> None:
            engine.save_checkpoint(str(folder), tag)
            engine.wait_for_checkpoint()

        save("good")
        good = stepped(engine)
        train(engine, num_steps=1)
        for failing in range(rank.size):
            full = mock.patch.object(files.Writer, "write_data", fails)
            for tag in ("good", "next"):
                with full if rank.rank == failing else nullcontext():
                    words = ("was not saved", f"rank {failing}: [Errno 28] No space left on device")
                    refusal(RuntimeError, partial(save, tag), *words)
        assert engine.load_checkpoint(str(folder))[0] == str(folder / "good")
        assert_identical(stepped(engine), good)
        train(engine, num_steps=1)
        save("next")
        assert engine.load_checkpoint(str(folder))[0] == str(folder / "next")
        assert names_in(folder) == ["good", "latest", "next"]


def test_what_one_rank_cannot_do(rank: Rank) -> None:
    """An error on all: to look for checkpoints, to read one, to finish one, to describe its state."""
    engine = engine_of(settings_of())
    save = partial(engine.save_checkpoint, str(rank.folder), "tag")
    load = partial(engine.load_checkpoint, str(rank.folder))
    save()
    for name, failing, call in (
        ("sdp_deepspeed.checkpoint.files.Reader.read", 1, load),
        ("sdp_deepspeed.checkpoint.atomic_folder.publish", 0, save),
        ("sdp_deepspeed.checkpoint.save_and_load.written_state", 1, save),
    ):
        fails = mock.patch(name, side_effect=OSError(5, "Input/output error"))
        with fails if rank.rank == failing else nullcontext():
            refusal((RuntimeError, OSError), call, "Input/output error", f"rank {failing}")
    load()
    (rank.folder / "file").write_text("")
    refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder / "file" / "x")), "Not a directory")


def test_calls_that_differ(rank: Rank) -> None:
    engine, folder = engine_of(settings_of()), str(rank.folder)
    save = partial(engine.save_checkpoint, folder)
    words = ("rank 0 called save 'of_0'", "rank 1 called save 'of_1'")
    refusal(ValueError, partial(save, f"of_{rank.rank}"), *words)
    calls = [partial(save, "a"), partial(engine.load_checkpoint, folder, tag="a")]
    refusal(RuntimeError, calls[rank.rank], "ranks made different calls: save_checkpoint; load_checkpoint")
    refusal(ValueError, partial(save, "a/b"), "expected the name of a folder")
    for nothing in ("", None):
        theirs = nothing if rank.rank == 0 else folder
        refusal(ValueError, partial(engine.save_checkpoint, theirs), "save_dir must be a non-empty string")
    refusal(ValueError, partial(engine.save_pretrained, ""), "folder must be a non-empty string")
    for strange in (nn.Linear(1, 1), Path("x"), lambda: None):
        mine = {"strange": strange if rank.rank == 0 else 1}
        refusal(ValueError, partial(save, "a", client_state=mine), "tensors, numbers")
    assert not list(rank.folder.glob("*/.metadata"))
    strict = engine_of(settings_of() | {"checkpoint": {"tag_validation": "Fail"}})  # as in DeepSpeed
    refusal(AssertionError, lambda: strict.save_checkpoint(folder, f"of_{rank.rank}"), "not consistent")
    strict.save_checkpoint(folder, "of_all")


def test_one_job_in_a_folder(rank: Rank) -> None:
    """Of another process: here one that the folder's lock is not told of."""
    first, second = (engine_of(settings_of()) for _ in range(2))
    folder = str(rank.folder)
    first.save_checkpoint(folder, "tag")
    if rank.rank == 0:
        atomic_folder.filelock.FileLock._instances.clear()
    refusal(ValueError, partial(second.save_checkpoint, folder, "tag"), "another job writes checkpoints")
    assert second.load_checkpoint(folder)[0] is not None
    first._core.checkpoints.close()
    second.save_checkpoint(folder, "tag")
