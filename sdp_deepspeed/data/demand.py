"""What jobs want that wait while another one writes their cache: files beside its folder, which the writer looks at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.data.journal import Place
from sdp_deepspeed.data.stream_writer import Wanted
from sdp_deepspeed.lock_owner import machine

_SECONDS_BETWEEN_LOOKS = 1.0
# Without a sign of life: several would have been missed.
_DEAD_SECONDS = 60.0


@contextmanager
def waiting_for(folder: Path) -> Iterator[Callable[[Wanted | None], None]]:
    """Gives what is to be called about once a second with what is wanted; with None when nobody needs to know."""
    path = folder.with_name(f".{folder.name}.wanted.{machine()}.{os.getpid()}")
    told: Wanted | None = None

    def say(wanted: Wanted | None) -> None:
        nonlocal told
        with suppress(OSError):  # a full disk, say, ends the one that writes
            if wanted is None:
                path.unlink(missing_ok=True)
            elif wanted == told and path.exists():
                os.utime(path)
            else:
                write_text(path, json.dumps(asdict(wanted)), concurrent=True)
        told = wanted

    try:
        yield say
    finally:
        say(None)


@dataclass(frozen=True)
class _Seen:
    """A file's content, what told it from others, and when that was new by this machine's clock."""

    wanted: Wanted
    version: tuple[int, int]
    at: float


class DemandOfOthers:
    """For the one that writes: what all want that wait for it.

    Args:
        folder: of the complete cache.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, _Seen] = {}
        self._looked = -_SECONDS_BETWEEN_LOOKS

    def __call__(self) -> list[Wanted]:
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            paths = sorted(self._folder.parent.glob(f".{self._folder.name}.wanted.*"))
            read = {path: self._read(path, now) for path in paths}
            self._seen = {path: seen for path, seen in read.items() if seen is not None}
        return [seen.wanted for seen in self._seen.values()]

    def _read(self, path: Path, now: float) -> _Seen | None:
        """None of a dead one, whose file is removed, or one that is gone or none of ours."""
        before = self._seen.get(path)
        try:
            stat = path.stat()
            version = stat.st_ino, stat.st_mtime_ns
            if before is not None and before.version == version:
                if now - before.at > _DEAD_SECONDS:
                    path.unlink()
                    return None
                return before
            values = json.loads(regular(path).read_text(encoding="utf-8"))
            reopen = None if values["reopen"] is None else Place(**values.pop("reopen"))
            return _Seen(Wanted(**values | {"reopen": reopen}), version, now)
        except (OSError, ValueError, KeyError, TypeError):
            return None
