"""One job at a time in a folder: who is refused, who takes over, and what a killed owner leaves behind."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdp_deepspeed import folder_lock
from sdp_deepspeed.folder_lock import LOCK, FolderInUseError, hold, is_held_by_others
from sdp_deepspeed.lock_owner import Owner
from tests.helpers.other_jobs import left_by, other_job
from tests.helpers.repository import ROOT

ELSEWHERE = {"machine": "another", "host": "far"}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "DEAD_SECONDS", 0.05)
    monkeypatch.setattr(folder_lock, "_SECONDS_BETWEEN_TRIES", 0.0)


def owner_of(folder: Path) -> Owner | None:
    return Owner.read((folder / LOCK).read_text())


def test_the_same_process_holds_it_again(tmp_path: Path) -> None:
    first = hold(tmp_path)
    assert hold(tmp_path / "x" / "..") is first
    assert owner_of(tmp_path) == Owner.here()
    assert not is_held_by_others(tmp_path)


def test_another_job_is_named(tmp_path: Path) -> None:
    with other_job(tmp_path, host="here", since="2026-01-02 03:04:05"):
        with pytest.raises(FolderInUseError, match=r"process 1234 on here since 2026-.*05 \(python other.py\): wait"):
            hold(tmp_path)
        assert is_held_by_others(tmp_path)
    hold(tmp_path)


def test_a_folder_that_was_made_anew_is_locked_anew(tmp_path: Path) -> None:
    writing = hold(tmp_path)
    (tmp_path / LOCK).unlink()
    with other_job(tmp_path), pytest.raises(FolderInUseError, match="process 1234"):
        hold(tmp_path)
    assert hold(tmp_path) is writing


def test_an_owner_that_is_gone_is_followed(tmp_path: Path) -> None:
    left_by(tmp_path)
    assert not is_held_by_others(tmp_path)
    hold(tmp_path)
    assert owner_of(tmp_path) == Owner.here()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "[" * 100_000])
def test_a_lock_that_was_cut_off_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    assert not is_held_by_others(tmp_path)
    hold(tmp_path)
    assert owner_of(tmp_path) == Owner.here()


def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _a_link_to_somebodys_file(path: Path) -> None:
    path.symlink_to(path.with_name("thesis"))
    path.with_name("thesis").write_text("years")


@pytest.mark.parametrize("make", [_a_pipe, Path.mkdir, _a_link_to_somebodys_file])
def test_a_lock_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    for call in (hold, is_held_by_others):
        with pytest.raises(ValueError, match=r"/\.lock is no file, as the lock of this folder must be: remove it"):
            call(tmp_path)
    assert [path.read_text() for path in tmp_path.glob("thesis")] in ([], ["years"])


def another_users(path: Path, monkeypatch: pytest.MonkeyPatch, mode: int = 0o444) -> None:
    """Also where the test runs as the superuser, whom no mode keeps out."""
    path.chmod(mode)
    real = os.open

    def opened(name: Path, flags: int, *rest: int) -> int:
        needed = 0o200 if flags & os.O_RDWR else 0o400
        if Path(name) == path and path.exists() and not path.stat().st_mode & needed:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


def test_what_another_user_left_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another_users(left_by(tmp_path), monkeypatch)
    assert not is_held_by_others(tmp_path)
    hold(tmp_path)
    assert owner_of(tmp_path) == Owner.here()
    assert os.access(tmp_path / LOCK, os.W_OK)


def test_what_another_user_holds_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_job(tmp_path):
        another_users(tmp_path / LOCK, monkeypatch)
        with pytest.raises(FolderInUseError, match="process 1234"):
            hold(tmp_path)
        assert is_held_by_others(tmp_path)


@pytest.mark.parametrize(("mode", "what"), [(0o444, "removed"), (0, "read")])
def test_the_user_who_has_to_remove_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, what: str
) -> None:
    """In a folder like /tmp, or a lock that is for its owner's eyes only: nobody but that user can tell."""
    another_users(left_by(tmp_path), monkeypatch, mode)

    def unlink(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    user = pwd.getpwuid(os.getuid()).pw_name
    with pytest.raises(ValueError, match=rf"/\.lock is a lock of the user {user}, and cannot be {what} here"):
        hold(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ValueError, match=rf"of the user {os.getuid()}, and"):
        hold(tmp_path)
    assert is_held_by_others(tmp_path) is (what == "read")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: Path, flags: int, *rest: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(name))

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(PermissionError):
        hold(tmp_path)


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """As an owner on another machine."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.001):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.slow
def test_an_owner_elsewhere_that_shows_life_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "DEAD_SECONDS", 1.0)
    with beating(left_by(tmp_path, **ELSEWHERE)):
        assert is_held_by_others(tmp_path)
        with pytest.raises(FolderInUseError, match="process 1234 on far"):
            hold(tmp_path)


@pytest.mark.slow
def test_an_owner_elsewhere_that_shows_none_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left_by(tmp_path, **ELSEWHERE)
    hold(tmp_path)
    assert "was in use by process 1234 on far" in caplog.text
    assert owner_of(tmp_path) == Owner.here()


def test_long_silence_needs_no_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = left_by(tmp_path, **ELSEWHERE)
    os.utime(path, (time.time() - 3600,) * 2)
    assert not is_held_by_others(tmp_path)
    hold(tmp_path)
    assert not caplog.text


@pytest.mark.slow
def test_without_locks_of_the_file_system_life_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "flock", lambda handle: False)
    monkeypatch.setattr(folder_lock, "DEAD_SECONDS", 1.0)
    with beating(left_by(tmp_path)), pytest.raises(FolderInUseError, match="process 1234"):
        hold(tmp_path)


_OWNER = """
import os, sys, time
from pathlib import Path
from sdp_deepspeed.folder_lock import hold
hold(Path(sys.argv[1]))
if len(sys.argv) == 2:
    if not os.fork():  # a worker of a data loader, which outlives it for a while
        print(flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_process_has_it_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            with pytest.raises(FolderInUseError, match=f"process {process.pid} on .* -c "):
                hold(tmp_path)
            process.kill()
            process.wait()
            assert (tmp_path / LOCK).exists()
            hold(tmp_path)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # an error if its child has ended, without which nothing is shown


@pytest.mark.slow
def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _OWNER, str(tmp_path), "ends"], check=True, cwd=ROOT)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_owner_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))

    def once(seconds: float) -> None:
        if (tmp_path / LOCK).stat().st_mtime > 0:
            raise InterruptedError

    monkeypatch.setattr(folder_lock.time, "sleep", once)
    with pytest.raises(InterruptedError):
        folder_lock._beat()


def test_the_user_of_a_lock_that_is_gone(tmp_path: Path) -> None:
    assert folder_lock._user_of(tmp_path / ".lock") == "somebody else"
    assert folder_lock._user_of(tmp_path).startswith("the user ")
