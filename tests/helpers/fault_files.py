"""Exports that are killed at any moment: complete or absent, and made again by the next run."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from sdp_deepspeed.checkpoint.files import WRITING, Reader
from sdp_deepspeed.checkpoint.hugging_face import export
from sdp_deepspeed.checkpoint.manager import COMMON, read_bytes


@dataclass
class FileOutcome:
    """Of one kill.

    Args:
        was_killed: False if the export was done before.
        problems: what must not be; empty if all is well.
    """

    was_killed: bool = False
    problems: list[str] = field(default_factory=list)


class FileFaults:
    """Exports of a checkpoint, killed again and again.

    Args:
        folder: empty; exports go there.
        checkpoints: a folder with a complete checkpoint.
        seed: of when they are killed.
    """

    def __init__(self, folder: Path, checkpoints: Path, *, seed: int) -> None:
        self._place, self._checkpoints, self._numbers = folder / "export", checkpoints, random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "transformers", "sdp_deepspeed.checkpoint.hugging_face"])
        self._place.mkdir(parents=True)
        began = time.monotonic()
        self._finish()
        self._seconds = time.monotonic() - began
        self._expected = digests(self._place)
        shutil.rmtree(self._place)

    def cycle(self) -> FileOutcome:
        """Start an export, kill it, look, let another run to its end, look again."""
        outcome = FileOutcome()
        self._place.mkdir()
        process = self._start()
        process.join(self._numbers.random() * self._seconds)
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        outcome.was_killed = process.exitcode == -signal.SIGKILL
        self._judge(outcome, "after the kill", may_be_absent=outcome.was_killed)
        self._finish()
        self._judge(outcome, "after the next run", may_be_absent=False)
        if left := [path.name for path in self._place.iterdir() if path.name != "hf"]:
            outcome.problems.append(f"the next run left {left}")
        shutil.rmtree(self._place)
        return outcome

    def _start(self) -> multiprocessing.process.BaseProcess:
        process = self._context.Process(target=export_to, args=(self._checkpoints, self._place / "hf"))
        process.start()
        return process

    def _finish(self) -> None:
        process = self._start()
        process.join(600)
        assert process.exitcode == 0, process.exitcode

    def _judge(self, outcome: FileOutcome, when: str, *, may_be_absent: bool) -> None:
        """What can be seen is all of it, or nothing."""
        found = digests(self._place)
        if found != self._expected and not (may_be_absent and not found):
            names = found.keys() | self._expected.keys()
            different = sorted(name for name in names if found.get(name) != self._expected.get(name))
            outcome.problems.append(f"{when}: {different} are missing or torn")


def export_to(checkpoints: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if target.exists():  # the kill came after all was done
        return
    newest = max(path for path in checkpoints.iterdir() if path.is_dir() and not path.name.startswith("."))
    reader = Reader(newest)
    export(reader, read_bytes(reader, COMMON), target, max_shard_size="4KB")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that is not being written, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.endswith(WRITING) for part in name.parts):
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
