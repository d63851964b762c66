"""Full disks and disks that cannot be written: an error on all ranks, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.checkpoint.files import INDEX
from tests.helpers.checkpointed_runs import names_in
from tests.helpers.models import config
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.slow

PAGE = os.sysconf("SC_PAGE_SIZE")


def settings_of(**block: Any) -> dict[str, Any]:
    return config(**({"holders": 1} | block))


class Saved:
    """An engine with a checkpoint "good", and one step more."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.engine = engine_of(settings_of(checkpoint=options))
        train(self.engine, num_steps=1)  # so that there are moments
        self.engine.save_checkpoint(str(folder), tag="good")
        self._good = dense_state(self.engine)
        train(self.engine, num_steps=1)

    def cannot_save(self, *words: str) -> str:
        """All ranks say the same; what was saved is as it was, and training goes on."""

        def save() -> None:
            self.engine.save_checkpoint(str(self.folder), tag="next")
            self.engine.wait_for_checkpoint()

        text = refusal(RuntimeError, save, "was not saved", *words)
        path, _ = self.engine.load_checkpoint(str(self.folder))
        assert path == str(self.folder / "good")
        assert_identical(dense_state(self.engine), self._good)
        train(self.engine, num_steps=1)
        return text

    def can_save(self) -> None:
        state = dense_state(self.engine)
        self.engine.save_checkpoint(str(self.folder), tag="next")
        self.engine.load_checkpoint(str(self.folder), tag="next")
        assert_identical(dense_state(self.engine), state)
        dist.barrier()
        assert names_in(self.folder) == ["good", "latest", "next"]
        dist.barrier()  # a rank that goes on may take the disk away


def a_disk_is_full(rank: Rank) -> None:
    """With each size of what is left, so that it ends in each file: tensors, DCP's index, checksums, `latest`."""
    if not may_mount():
        return
    with _disk(rank) as folder:
        saved = Saved(folder)
        needed = sum(-(-path.stat().st_size // PAGE) for path in (folder / "good").iterdir()) + 1
        texts = []
        for pages in [*range(0, needed - 4, 8), *range(needed - 4, needed)]:
            with _full(rank, folder, pages):
                texts.append(saved.cannot_save("No space left on device"))
        assert sum(".distcp" in text for text in texts) > 1, texts
        assert any(INDEX in text for text in texts), texts
        assert not any(name in texts[-1] for name in (".distcp", INDEX)), texts  # what comes after them
        saved.can_save()


def a_disk_is_read_only(rank: Rank) -> None:
    if not may_mount():
        return
    with _disk(rank) as folder:
        saved = Saved(folder)
        saved.engine.checkpoints.close()  # no disk becomes read-only while a file on it is open to be written
        _on_rank_0(rank, lambda: _system("mount", "-o", "remount,ro", str(folder)))
        saved.cannot_save("Read-only file system")
        _on_rank_0(rank, lambda: _system("mount", "-o", "remount,rw", str(folder)))
        saved.can_save()


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@contextmanager
def _disk(rank: Rank) -> Iterator[Path]:
    """A disk of its own."""
    folder = rank.folder / "disk"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    _on_rank_0(rank, lambda: _system("mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)))
    try:
        yield folder
    finally:
        if rank.rank == 0:
            _system("umount", "--lazy", str(folder))
    dist.barrier()


@contextmanager
def _full(rank: Rank, folder: Path, pages: int) -> Iterator[None]:
    """Only so many pages are left."""
    filler = folder / "filler"

    def fill() -> None:
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - pages * PAGE))

    _on_rank_0(rank, fill)
    yield
    _on_rank_0(rank, filler.unlink)


def _on_rank_0(rank: Rank, work: Callable[[], object]) -> None:
    dist.barrier()
    if rank.rank == 0:
        work()
    dist.barrier()


def _system(*words: str) -> None:
    subprocess.run(words, check=True)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (a_disk_is_full, a_disk_is_read_only):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None, request: pytest.FixtureRequest) -> None:
    assert outcome is None, outcome
    if "a_disk" in request.node.name and not may_mount():
        pytest.skip("mounting a disk of one's own needs the superuser")
