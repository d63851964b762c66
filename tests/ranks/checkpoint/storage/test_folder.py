"""Complete or absent: what a checkpoint's folder looks like after a failure, and what is loaded from it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from sdp_deepspeed.checkpoint.storage.manifest import HashedFile
from tests.helpers.models import config
from tests.helpers.ranks import Rank
from tests.helpers.trained_states import names_in
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train


def settings_of(**block: Any) -> dict[str, Any]:
    return config(**({"holders": 1} | block))


def damaged_files_are_refused(rank: Rank) -> None:
    """Each file of a checkpoint in turn, and `latest`, is cut short, changed in one bit, deleted."""
    engine = engine_of(settings_of())
    folder = rank.folder
    engine.save_checkpoint(str(folder), tag="older")
    older = dense_state(engine)
    train(engine, num_steps=1)
    engine.save_checkpoint(str(folder), tag="newer")
    newer = dense_state(engine)
    names = sorted(path.name for path in (folder / "newer").iterdir())
    assert {"manifest.json", "tensors.json", "plan.json", "common.pt", "rank_00001.pt"} < set(names)
    for name in names:
        for damage in (_cut, _flip, _delete):
            with _damaged(rank, folder / "newer" / name, damage):
                refusal(ValueError, partial(engine.load_checkpoint, str(folder), tag="newer"), "newer")
                assert_identical(dense_state(engine), newer)
                path, _ = engine.load_checkpoint(str(folder))
                assert path == str(folder / "older")
                assert_identical(dense_state(engine), older)
            assert engine.load_checkpoint(str(folder))[0] == str(folder / "newer")
    for damage in (_cut, _flip, _delete, lambda path: path.write_text("x" * 300)):
        with _damaged(rank, folder / "latest", damage):
            assert engine.load_checkpoint(str(folder))[0] == str(folder / "newer")


def all_are_damaged(rank: Rank) -> None:
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder))
    load = partial(engine.load_checkpoint, str(rank.folder))
    with _damaged(rank, rank.folder / "global_step0" / "tensors.json", _delete):
        refusal(ValueError, load, "tensors.json is missing", "no complete")
    with _damaged(rank, rank.folder / "global_step0" / "manifest.json", _flip):
        refusal(ValueError, load, "manifest.json is damaged", "no complete")
        with _damaged(rank, rank.folder / "latest", _delete):
            refusal(ValueError, load, "latest is missing", "no complete")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _delete(path: Path) -> None:
    path.unlink()


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


def a_failing_rank_leaves_the_last_checkpoint(rank: Rank) -> None:
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder), tag="good")
    good = dense_state(engine)
    train(engine, num_steps=1)
    write = HashedFile.write

    def full_disk(file: HashedFile, data: bytes | memoryview) -> None:
        if Path(file.name).name.startswith(failing):
            write(file, data[:1])
            raise OSError(28, "No space left on device")
        write(file, data)

    HashedFile.write = full_disk  # type: ignore[assignment, method-assign]
    for failing in ("tensors_00000", "tensors_00001", "tensors.json", "rank_00001", "common"):
        for tag in ("next", "good"):
            save = partial(engine.save_checkpoint, str(rank.folder), tag=tag)
            refusal(RuntimeError, save, f"cannot write {rank.folder}", failing, "No space left", "intact")
    HashedFile.write = write  # type: ignore[method-assign]
    dist.barrier()
    assert names_in(rank.folder) == ["good", "latest"]
    path, _ = engine.load_checkpoint(str(rank.folder))
    assert path == str(rank.folder / "good")
    assert_identical(dense_state(engine), good)
    engine.save_checkpoint(str(rank.folder), tag="next")


def a_rank_that_cannot_read(rank: Rank) -> None:
    """What only one rank sees after all files were verified: an error on all, none waits for the others."""
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder))
    read = SafetensorsReader.read_data

    def torn(self: SafetensorsReader, plan: Any, planner: Any) -> Any:
        if rank.rank == 1:
            raise OSError(5, "Input/output error")
        return read(self, plan, planner)

    SafetensorsReader.read_data = torn  # type: ignore[method-assign]
    load = partial(engine.load_checkpoint, str(rank.folder))
    refusal(ValueError, load, "checkpoint", "Input/output error", "rank 1")
    SafetensorsReader.read_data = read  # type: ignore[method-assign]
    engine.load_checkpoint(str(rank.folder))


def a_folder_that_cannot_be_written(rank: Rank) -> None:
    """A file where the folder should be: refused to the superuser too, unlike a folder without permission."""
    engine = engine_of(settings_of())
    blocked = rank.folder / "file"
    if rank.rank == 0:
        blocked.write_text("")
    dist.barrier()
    refusal(RuntimeError, lambda: engine.save_checkpoint(str(blocked)), "checkpoint", "file")
    train(engine, num_steps=1)


def a_leftover_is_never_loaded(rank: Rank) -> None:
    """What a killed process leaves behind: a folder written in part, beside the last good one."""
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder), tag="good")
    good = dense_state(engine)
    if rank.rank == 0:
        for name in (".next.writing", ".old.removed", ".good.replaced"):
            (rank.folder / name).mkdir()
            (rank.folder / name / "rank_00000.pt").write_bytes(b"torn")
        (rank.folder / ".latest.writing").write_text("ne")
    dist.barrier()
    train(engine, num_steps=1)
    path, _ = engine.load_checkpoint(str(rank.folder))
    assert path == str(rank.folder / "good")
    assert_identical(dense_state(engine), good)
    refusal(ValueError, lambda: engine.load_checkpoint(str(rank.folder), tag="next"), "no folder")
    engine.save_checkpoint(str(rank.folder), tag="next")
    assert engine.load_checkpoint(str(rank.folder))[0] == str(rank.folder / "next")
    dist.barrier()
    assert names_in(rank.folder) == ["good", "latest", "next"]


def the_newest_is_what_was_written_last(rank: Rank) -> None:
    """After going back, not what has more steps: that is the branch that was left."""
    engine = engine_of(settings_of(checkpoint={"keep_last": 3}))
    folder = str(rank.folder)
    for _ in range(3):
        train(engine, num_steps=1)
        engine.save_checkpoint(folder)
    engine.load_checkpoint(folder, tag="global_step1")
    engine.save_checkpoint(folder, tag="again")
    assert sorted(path.name for path in rank.folder.glob("[!.l]*")) == ["again", "global_step2", "global_step3"]
    with _damaged(rank, rank.folder / "latest", _delete):
        assert engine.load_checkpoint(folder)[0] == str(rank.folder / "again")


def old_ones_are_pruned(rank: Rank) -> None:
    engine = engine_of(settings_of(checkpoint={"keep_last": 2}))
    for _ in range(4):
        engine.save_checkpoint(str(rank.folder))
        train(engine, num_steps=1)
    dist.barrier()
    assert names_in(rank.folder) == ["global_step2", "global_step3", "latest"]


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        damaged_files_are_refused,
        all_are_damaged,
        a_failing_rank_leaves_the_last_checkpoint,
        a_folder_that_cannot_be_written,
        a_rank_that_cannot_read,
        a_leftover_is_never_loaded,
        old_ones_are_pruned,
        the_newest_is_what_was_written_last,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
