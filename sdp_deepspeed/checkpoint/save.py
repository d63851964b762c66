"""Write a checkpoint from all ranks: in a staging folder, complete, then published; at once or in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sdp_deepspeed.checkpoint.state.chunks import SavePlanner
from sdp_deepspeed.checkpoint.state.host_copy import HostCopy, HostMemory
from sdp_deepspeed.checkpoint.state.snapshot import Snapshot
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsWriter
from sdp_deepspeed.checkpoint.storage.errors import translating_os_errors
from sdp_deepspeed.checkpoint.storage.manifest import FORMAT, hashed_file
from sdp_deepspeed.checkpoint.storage.names import COMMON, rank_file, tensors_file
from sdp_deepspeed.checkpoint.storage.signposts import signposts
from sdp_deepspeed.distributed.agreement import run_on_all_ranks, run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Args:
        latest: whether `latest` names it afterward.
        keep_last: how many checkpoints stay in the folder; None keeps all.
    """

    folder: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None


class Saver:
    """Writes snapshots, one at a time.

    Args:
        world: all ranks, in a group that nothing else uses: it may run in a thread.
        group: the process group of `world`; a CPU backend.
        report: told by every rank what went wrong in the background; rank 0 is to tell the user.
    """

    def __init__(self, world: Communicator, group: Any, report: Callable[[str], None]) -> None:
        self._world, self._group, self._report = world, group, report
        self._memory = HostMemory()
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
        """As `save`, but returns when `snapshot` is copied, of which a part is written by then; errors are raised by
        the next call, or by `wait`."""
        self.wait()
        copy = run_on_all_ranks(self._world, partial(HostCopy, snapshot.chunks, self._memory))
        arriving = replace(snapshot, chunks=copy.chunks)
        thread = threading.Thread(target=self._run, args=(arriving, target), name="checkpoint")
        thread.start()
        self._thread = thread
        copy.run()

    def wait(self) -> None:
        """Until what runs in the background is complete; raises its error."""
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
            self._report(f"{problem}")  # at once: the next call is far away, or never comes

    def _write(self, snapshot: Snapshot, target: Target) -> None:
        world = self._world
        with ExitStack() as held:
            run_on_rank_0(world, translating_os_errors(lambda: held.enter_context(files.only_writer(target.folder))))
            self._write_alone(snapshot, target)

    def _write_alone(self, snapshot: Snapshot, target: Target) -> None:
        world = self._world
        try:
            staging = run_on_rank_0(
                world, translating_os_errors(partial(files.open_staging, target.folder, target.tag))
            )
            records = world.gather_objects(self._write_files(snapshot, staging))
            manifest = {
                "format": FORMAT,
                "global_steps": snapshot.global_steps,
                "saved_at": time.time_ns(),
                "ranks": world.size,
                "files": {name: record for of_rank in records for name, record in of_rank.items()},
            }
            run_on_rank_0(world, translating_os_errors(partial(publish, manifest, target)))
        except BaseException as problem:
            if world.rank == 0:
                files.abort(target.folder, target.tag)
            if isinstance(problem, RuntimeError) and not str(problem).startswith("checkpoint"):
                # PyTorch's own, such as gloo's after another rank was killed
                raise RuntimeError(
                    f"checkpoint: {target.folder / target.tag} was not saved: {problem}; earlier checkpoints are intact"
                ) from problem
            raise

    def _write_files(self, snapshot: Snapshot, path: Path) -> dict[str, Any]:
        """This rank's files; returns what the manifest says of them."""
        rank = self._world.rank
        writer = SafetensorsWriter(path, tensors_file(rank))
        try:
            dcp.save(dict(snapshot.chunks), storage_writer=writer, planner=SavePlanner(), process_group=self._group)
        except CheckpointException as problem:
            raise _first_failure(problem) from None
        contents: dict[str, bytes] = {rank_file(rank): snapshot.own}
        if rank == 0:
            contents |= {COMMON: snapshot.common} | {name: text.encode() for name, text in snapshot.documents.items()}
            contents |= signposts()
        run_on_all_ranks(self._world, translating_os_errors(partial(_write_all, path, contents, writer.records)))
        return writer.records


def _write_all(path: Path, contents: Mapping[str, bytes], records: dict[str, Any]) -> None:
    for name, content in contents.items():
        with hashed_file(path / name, records) as file:
            file.write(content)


def publish(manifest: Mapping[str, Any], target: Target) -> None:
    """Complete what all ranks have written, and remove what is older than the target keeps; one rank calls it."""
    files.publish(target.folder, target.tag, manifest, latest=target.latest)
    if target.keep_last is not None:
        older = [tag for tag in files.complete_tags(target.folder) if tag != target.tag]
        files.prune(target.folder, [*older, target.tag], keep=target.keep_last)


def _first_failure(problem: CheckpointException) -> Exception:
    """The error of the first rank that has one, without DCP's stack of all."""
    rank, (error, _) = min(problem.failures.items())
    text = str(error) if isinstance(error, (RuntimeError, ValueError)) else f"checkpoint: {error!r}"
    return (ValueError if isinstance(error, ValueError) else RuntimeError)(f"{text} [on rank {rank}]")
