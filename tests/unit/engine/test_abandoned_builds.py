"""Locks of builds: which are removed, which are told, and which are left alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.engine import abandoned_builds
from sdp_deepspeed.engine.abandoned_builds import remove_abandoned_builds


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a build that was killed, on a machine without containers."""
    path = tmp_path / "operator" / "lock"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(abandoned_builds, "_PRIVATE", {"overlay", "tmpfs", *kinds_of_file_systems()})
    return path


def kinds_of_file_systems() -> set[str]:
    return {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}


def test_a_killed_builds_lock_is_removed_at_start(lock: Path) -> None:
    (text,) = remove_abandoned_builds()
    assert text.startswith(f"{lock} was left 0 minutes ago by a build of an operator that was killed")
    assert not lock.exists()
    assert remove_abandoned_builds() == []


def test_a_running_builds_lock_and_what_is_no_lock_stay(lock: Path) -> None:
    with lock.open("rb"):
        assert remove_abandoned_builds() == []
    lock.write_text("a lock is empty")
    assert remove_abandoned_builds() == []
    assert lock.exists()


@pytest.mark.parametrize(("private", "local"), [(set(), set()), (set(), "all")])
def test_where_others_may_build_it_is_told_until_no_build_takes_so_long(
    lock: Path, monkeypatch: pytest.MonkeyPatch, private: set[str], local: Any
) -> None:
    """A file system that other machines see, or a container that does not see the processes of others."""
    monkeypatch.setattr(abandoned_builds, "_PRIVATE", private)
    monkeypatch.setattr(abandoned_builds, "_LOCAL", kinds_of_file_systems() if local else set())
    monkeypatch.setattr(abandoned_builds, "_FIRST_NAMESPACE", "pid:[1]")
    (text,) = remove_abandoned_builds()
    assert text.startswith(str(lock))
    assert "delete the file if no other machine, container or user is building" in text
    assert lock.exists()
    os.utime(lock, (time.time() - 3600,) * 2)
    assert "60 minutes ago by a build of an operator that was killed" in remove_abandoned_builds()[0]
    assert not lock.exists()


def test_another_users_build_may_not_be_seen(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files its processes have open is theirs to know, so that only time tells."""
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    assert "if no other machine, container or user is building" in remove_abandoned_builds()[0]
    assert lock.exists()
    os.utime(lock, (time.time() - 3600,) * 2)
    remove_abandoned_builds()
    assert not lock.exists()


def test_without_the_variable_it_is_pytorchs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = tmp_path / "torch_extensions" / "py311_cpu" / "operator" / "lock"
    other.parent.mkdir(parents=True)
    other.touch()
    remove_abandoned_builds()
    assert (lock.exists(), other.exists()) == (True, False)


def test_pytorch_would_wait_for_it(lock: Path) -> None:
    """Else there is nothing to remove: its name, that it is empty, and that a build has it open."""
    from torch.utils.file_baton import FileBaton

    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert lock.stat().st_size == 0
    assert remove_abandoned_builds() == []
    assert not FileBaton(str(lock)).try_acquire()
    assert baton.fd is not None
    os.close(baton.fd)  # as if it was killed
    assert len(remove_abandoned_builds()) == 1
    assert FileBaton(str(lock)).try_acquire()
