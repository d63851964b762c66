"""Write a checkpoint from all ranks: aside, complete, then published; at once or behind the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from deepspeed.utils import logger
from torch.distributed.checkpoint.api import CheckpointException

from sdp_deepspeed.checkpoint.state.chunks import SavePlanner
from sdp_deepspeed.checkpoint.state.snapshot import Snapshot
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsWriter, hashed_file
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator

COMMON = "common.pt"


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Args:
        latest: whether `latest` names it afterwards.
        keep_last: how many checkpoints stay in the folder; None keeps all.
    """

    folder: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None


def own_file(rank: int) -> str:
    """What only this rank has."""
    return f"rank_{rank:05d}.pt"


class Saver:
    """Writes snapshots, one at a time.

    Args:
        communicator: all ranks, in a group that nothing else uses: it may run in a thread.
        group: the process group of `communicator`; a CPU backend.
    """

    def __init__(self, communicator: Communicator, group: Any) -> None:
        self._communicator, self._group = communicator, group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, snapshot: Snapshot, target: Target) -> None:
        """Every rank calls it.

        Raises:
            RuntimeError: on all ranks, if one could not write; the folder is then as it was before.
        """
        self.wait()
        self._write(snapshot, target)

    def save_behind(self, snapshot: Snapshot, target: Target) -> None:
        """As `save`, but returns when `snapshot` is copied; errors are raised by the next call, or by `wait`."""
        self.wait()
        copy = together(self._communicator, snapshot.to_host)
        self._thread = threading.Thread(target=self._run, args=(copy, target), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what runs behind the training is complete; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, snapshot: Snapshot, target: Target) -> None:
        try:
            self._write(snapshot, target)
        except Exception as problem:
            self._error = problem
            if self._communicator.rank == 0:  # at once: the next call is far away, or never comes
                logger.error(f"{problem}")

    def _write(self, snapshot: Snapshot, target: Target) -> None:
        communicator, writes = self._communicator, self._communicator.rank == 0
        try:
            together(communicator, lambda: files.prepare(target.folder, target.tag) if writes else None)
            records = self._write_files(snapshot, files.aside(target.folder, target.tag))
            every = communicator.gather_objects(records)
            facts = {
                "format": files.FORMAT,
                "global_steps": snapshot.global_steps,
                "saved_at": time.time_ns(),
                "ranks": communicator.size,
                "files": {name: record for own in every for name, record in own.items()},
            }
            together(communicator, lambda: _publish(facts, target) if writes else None)
        except BaseException as problem:
            if writes:
                files.discard(target.folder, target.tag)
            if isinstance(problem, RuntimeError) and not str(problem).startswith("checkpoint"):
                # PyTorch's own, such as gloo's after another rank was killed
                raise RuntimeError(
                    f"checkpoint: {target.folder / target.tag} was not saved: {problem}; earlier checkpoints are intact"
                ) from problem
            raise

    def _write_files(self, snapshot: Snapshot, path: Path) -> dict[str, Any]:
        communicator = self._communicator
        writer = SafetensorsWriter(path, f"tensors_{communicator.rank:05d}.safetensors")
        try:
            dcp.save(dict(snapshot.chunks), storage_writer=writer, planner=SavePlanner(), process_group=self._group)
        except CheckpointException as problem:
            raise _first_failure(problem) from None
        own: dict[str, bytes] = {own_file(communicator.rank): snapshot.own}
        if communicator.rank == 0:
            own |= {COMMON: snapshot.common} | {name: text.encode() for name, text in snapshot.documents.items()}
        together(communicator, lambda: _write_all(path, own, writer.records))
        return writer.records


def _write_all(path: Path, contents: Mapping[str, bytes], records: dict[str, Any]) -> None:
    for name, content in contents.items():
        with hashed_file(path / name, records) as file:
            file.write(content)


def _publish(facts: Mapping[str, Any], target: Target) -> None:
    files.publish(target.folder, target.tag, facts, latest=target.latest)
    if target.keep_last is not None:
        files.prune(target.folder, target.keep_last, target.tag)


def _first_failure(problem: CheckpointException) -> Exception:
    """The error of the first rank that has one, without DCP's stack of all."""
    rank, (error, _) = min(problem.failures.items())
    text = str(error) if isinstance(error, (RuntimeError, ValueError)) else f"checkpoint: {error!r}"
    return (ValueError if isinstance(error, ValueError) else RuntimeError)(f"{text} [on rank {rank}]")


def together(communicator: Communicator, work: Callable[[], Any]) -> Any:
    """Run `work` on every rank; an error of one is raised on all, the system's with the file."""

    def named() -> Any:
        try:
            return work()
        except OSError as problem:
            text = f"checkpoint: {problem.strerror or problem}: {problem.filename or ''}"
            raise RuntimeError(text.rstrip(": ")) from problem

    return run_on_all_ranks(communicator, named)
