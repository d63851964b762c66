"""Tokenizing beside training: one process for each source and machine, which stays as far ahead as its ranks ask.

Ranks tell it what they want through its stdin; what it has written they see in the journal. It ends with the rank that
started it. Where machines share the cache's folder, one of their processes writes and the others wait to take over.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.data import lifeline
from sdp_deepspeed.data.cache import Cache
from sdp_deepspeed.data.prepare import naming_the_disk, write_cache
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.progress import LogProgress, show_log
from sdp_deepspeed.data.stream_writer import Wanted
from sdp_deepspeed.folder_lock import release_all

_SECONDS_OF_A_PROBLEM = 86400.0
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}


def problem_path(folder: Path, job: str) -> Path:
    """Where a writer that failed says why, beside the folder of its cache: to its own job, as another's may go on."""
    return folder.with_name(f".{folder.name}.{job}.problem")


class BackgroundWriter:
    """The process, from the side of the rank that starts it.

    Args:
        cache: to write.
        job: whose ranks read it.
    """

    def __init__(self, cache: Cache, job: str) -> None:
        self._cache = cache
        self._problem = problem_path(cache.folder, job)
        self._process: Any = None

    def start(self) -> None:
        """Nobody waits for what it writes yet: what an earlier one said is forgotten, also to jobs long gone."""
        self._problem.unlink(missing_ok=True)
        for path in self._cache.folder.parent.glob(problem_path(self._cache.folder, "*").name):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_OF_A_PROBLEM:
                    path.unlink()
        self._process = lifeline.start("sdp_deepspeed.data.background")
        atexit.register(self.stop)
        self._say((self._cache, self._problem))

    def tell(self, wanted: Wanted) -> None:
        """What ranks wait for, or will soon."""
        self._say(wanted)

    def look(self) -> None:
        """Leave word for all ranks if it was killed."""
        code = self._process.poll()
        if code not in (None, 0) and not self._problem.exists():
            said = f"the process that tokenizes beside training ended (exit code {code}): start the run again"
            write_problem(self._problem, RuntimeError(said))

    def stop(self) -> None:
        """End it now."""
        lifeline.stop(self._process)

    def _say(self, message: tuple[Cache, Path] | Wanted) -> None:
        with suppress(OSError, ValueError):  # it has ended, which `look` tells
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()


def raise_problem(problem: Path) -> None:
    """The error of the writer that says there why, if it has failed.

    Raises:
        ValueError, OSError: as it was there.
        PreparedDataError: everything else.
    """
    try:
        content = json.loads(regular(problem).read_text(encoding="utf-8"))
        kind, said = _KINDS.get(content["kind"], PreparedDataError), str(content["said"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreparedDataError(f"tokenizing failed, and {problem} cannot be read: {error!r}") from None
    raise kind(said)


def write_problem(path: Path, error: Exception) -> None:
    """Say to all ranks why there will be no more tokens."""
    kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "RuntimeError")
    said = str(error) if kind != "RuntimeError" or isinstance(error, RuntimeError) else repr(error)
    write_text(path, json.dumps({"kind": kind, "said": " ".join(said.split())}), concurrent=True)


class _Demand:
    """The last thing that was asked for; nothing at first."""

    def __init__(self) -> None:
        self.wanted = Wanted(stop=1)  # one part, so that a mistake in the text is found at start
        threading.Thread(target=self._listen, name="demand", daemon=True).start()

    def __call__(self) -> Wanted:
        return self.wanted

    def _listen(self) -> None:
        with suppress(EOFError, pickle.UnpicklingError):  # the rank has ended, or will
            while True:
                self.wanted = pickle.load(sys.stdin.buffer)


def main() -> int:
    """Write until all is there, or the rank has ended; returns the exit code."""
    lifeline.end_with_parent()
    show_log()
    try:
        cache, problem = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # the rank has ended
        return 0
    try:
        with naming_the_disk(cache.folder.parent):
            write_cache(cache, wanted=_Demand(), progress=LogProgress())
    except Exception as error:
        write_problem(problem, error)
        return 2
    return 0


if __name__ == "__main__":
    exit_code = main()
    release_all()
    os._exit(exit_code)  # the thread that listens would keep an ordinary end from closing stdin
