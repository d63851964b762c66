"""Data preparations and exports that are killed at any moment: complete or absent, and made again by the next run."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.prepare import prepare

WORDS = ("def", "return", "self", "x", "=", "(", ")", ":", "for", "in", "range", "model", "rank", "1", "\n")
PRELOAD = ["torch", "transformers", "sdp_deepspeed.checkpoint.interop.export", "sdp_deepspeed.data"]


@dataclass
class FileOutcome:
    """Of one kill.

    Args:
        was_killed: False if the work was done before.
        left: names that the kill left behind, hidden ones.
        problems: what must not be; empty if all is well.
    """

    kind: str
    was_killed: bool = False
    left: int = 0
    problems: list[str] = field(default_factory=list)


class FileFaults:
    """Works on files, killed again and again.

    Args:
        folder: empty; texts, caches and exports go there.
        checkpoints: a folder with a complete checkpoint.
        seed: of all that is random here.
    """

    def __init__(self, folder: Path, checkpoints: Path, *, seed: int) -> None:
        self._folder, self._numbers = folder, random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        text.write_text("\n\n".join(" ".join(self._numbers.choices(WORDS, k=40)) for _ in range(1500)))
        self._works: dict[str, tuple[Callable[..., None], tuple[Path, Path]]] = {
            "prepare": (prepare_in, (text, folder / "prepare")),
            "export": (export_to, (checkpoints, folder / "export" / "hf")),
        }
        self._expected: dict[str, dict[str, str]] = {}
        self._seconds: dict[str, float] = {}
        for kind in self._works:
            began = time.monotonic()
            self._finish(kind)
            self._seconds[kind] = time.monotonic() - began
            self._expected[kind] = digests(folder / kind)
            shutil.rmtree(folder / kind)

    def cycle(self) -> FileOutcome:
        """Start one of the works, kill it, look, let it run to its end, look again."""
        outcome = FileOutcome(self._numbers.choice(list(self._works)))
        place = self._folder / outcome.kind
        place.mkdir(exist_ok=True)
        process = self._start(outcome.kind)
        process.join(self._numbers.random() * self._seconds[outcome.kind])
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        outcome.was_killed = process.exitcode == -signal.SIGKILL
        self._judge(outcome, "after the kill", complete=not outcome.was_killed)
        outcome.left = sum(path.name.startswith(".") for path in place.rglob("*"))
        self._finish(outcome.kind)
        self._judge(outcome, "after the next run", complete=True)
        if hidden := [path.name for path in place.rglob(".*") if path.name != ".lock"]:
            outcome.problems.append(f"{outcome.kind}: the next run left {hidden}")
        shutil.rmtree(place)
        return outcome

    def _start(self, kind: str) -> multiprocessing.process.BaseProcess:
        work, arguments = self._works[kind]
        process = self._context.Process(target=work, args=arguments)
        process.start()
        return process

    def _finish(self, kind: str) -> None:
        process = self._start(kind)
        process.join(60)
        assert process.exitcode == 0, (kind, process.exitcode)

    def _judge(self, outcome: FileOutcome, when: str, *, complete: bool) -> None:
        """What can be seen of each folder is all of it, or nothing."""
        found, expected = digests(self._folder / outcome.kind), self._expected[outcome.kind]
        begun = {name.partition("/")[0] for name in found}
        if found != {name: digest for name, digest in expected.items() if complete or name.partition("/")[0] in begun}:
            different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            outcome.problems.append(f"{outcome.kind}, {when}: {different} are missing or torn")


def prepare_in(text: Path, cache: Path) -> None:
    prepare(
        DataConfig(source="files", path=str(text), text_documents="paragraph", vocab_size=320, cache_dir=str(cache))
    )


def export_to(checkpoints: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if target.exists():  # the kill came after all was done
        return
    newest = max(path for path in checkpoints.iterdir() if path.is_dir() and not path.name.startswith("."))
    export(newest, target, ExportFormat(max_shard_bytes=4000), None)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that is not hidden and in no hidden folder, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
