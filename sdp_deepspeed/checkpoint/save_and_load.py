"""Save and load checkpoints: the implementation of `save_checkpoint` and `load_checkpoint` of both hosts.

Besides the tensors of saved_tensors.py, a checkpoint contains `common` (one for the run: counters, LR scheduler, loss
scale, client state, facts of the optimizer) and `rank/N` (random state and buffers of each rank). Both are bytes of
`torch.save` in uint8 tensors and are read with `weights_only=True`, so loading a checkpoint does not execute code.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sdp_deepspeed.checkpoint import atomic_folder, files
from sdp_deepspeed.checkpoint.atomic_folder import output_folder
from sdp_deepspeed.checkpoint.dcp_planners import LoadPlanner, SavePlanner, State, add_box, on_host
from sdp_deepspeed.checkpoint.hf_folder import model_facts, tied_names
from sdp_deepspeed.checkpoint.optimizer_state import Moments, group_facts, optimizer_facts, restore_optimizer
from sdp_deepspeed.checkpoint.random_state import random_state, restore_random_state
from sdp_deepspeed.checkpoint.rank_state import RankState, buffers_of_rank, restore_buffers
from sdp_deepspeed.checkpoint.saved_tensors import make_targets, written_state
from sdp_deepspeed.config import CheckpointOptions
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.consistency import gather_objects, gather_results, run_on_all_ranks
from sdp_deepspeed.parallel.groups import control_group

logger = logging.getLogger("sdp_deepspeed")
COMMON, RANK = "common", "rank"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Args:
        facts: everything but tensors, common to all ranks; "common" has counters, LR scheduler, loss scaler and client
            state.
    """

    path: Path
    facts: dict[str, Any]


class Checkpointer:
    """Checkpoints of one run. Constructor and methods are collective; the caller has synchronized all ranks
    (`CallBarrier`).

    With `asynchronous`, `save` returns once the state has been copied to host memory. Writing then continues during
    training, and communicates over a separate process group.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._executor = ThreadPoolExecutor(1, "sdp_checkpoint") if options.asynchronous else None
        self._group = control_group() if options.asynchronous else None
        self._saving: Future[None] | None = None
        self._lock: tuple[Path, filelock.BaseFileLock | None] | None = None

    # ---- save -------------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | Path,
        tag: str | None,
        state: RankState,
        counters: Mapping[str, int],
        *,
        lr_scheduler: Any,
        loss_scaler: Mapping[str, Any] | None = None,
        client_state: Mapping[str, Any] | None,
        latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """Save a checkpoint to `save_dir / tag`.

        Args:
            tag: default: the step.
            counters: by the names in COUNTERS.
            client_state: tensors, numbers, strings, lists and dicts, as the state of the LR scheduler.

        Raises:
            ValueError: on all ranks, if there is no folder, the tag is invalid or differs between ranks, a state has
                other types, or another job writes to the folder.
            RuntimeError: on all ranks, if this or a previous asynchronous save fails. Earlier checkpoints are intact.
        """
        control, is_first = state.groups.control, dist.get_rank() == 0
        folder = run_on_all_ranks(lambda: output_folder(save_dir), control)
        tag = f"global_step{counters['global_steps']}" if tag is None else str(tag)
        common = {
            "counters": dict(counters),
            "lr_scheduler": lr_scheduler.state_dict() if hasattr(lr_scheduler, "state_dict") else None,
            "loss_scaler": dict(loss_scaler or {}),
            "client_state": dict(client_state or {}),
        }
        self.wait()
        numbers = _gather(f"save {tag!r} in {folder}", lambda: group_facts(state), control)

        def prepare() -> State:
            atomic_folder.check_tag(tag)
            tensors = written_state(state, exclude_frozen=exclude_frozen)
            of_rank = {"random": random_state(), "buffers": buffers_of_rank(state)}
            add_bytes(tensors, f"{RANK}/{dist.get_rank()}", plain_bytes(of_rank))
            whole = plain_bytes(_facts(state, numbers) | {"common": common})
            if is_first:
                add_bytes(tensors, COMMON, whole)
                self._take_lock(folder)
                atomic_folder.create_unfinished(folder, tag)
            return tensors if self._executor is None else on_host(tensors)

        try:
            tensors = run_on_all_ranks(prepare, control)
        except OSError as error:
            raise RuntimeError(f"checkpoint {folder / tag} was not saved: {error}") from error
        if self._executor is None:
            self._write(folder, tag, tensors, latest, control)
        else:
            self._saving = self._executor.submit(self._write, folder, tag, tensors, latest, self._group)

    def _take_lock(self, folder: Path) -> None:
        """Lock a folder, and release the previous one; the Trainer uses a new folder for each checkpoint."""
        folder = folder.absolute()
        if self._lock is None or self._lock[0] != folder:
            lock = atomic_folder.lock_folder(folder)
            self._release_lock()
            self._lock = folder, lock

    def _release_lock(self) -> None:
        if self._lock is not None and self._lock[1] is not None:
            self._lock[1].release()
        self._lock = None

    def _write(self, folder: Path, tag: str, tensors: State, latest: bool, group: dist.ProcessGroup | None) -> None:
        """Write and publish the files; collective. Runs in a thread if saving is asynchronous."""
        is_first = dist.get_rank() == 0
        is_on_device = any(not v.is_cpu for boxes in tensors.values() for v in boxes.parts.values())
        writer = files.Writer(folder / f"{tag}{files.WRITING}", from_device=is_on_device)

        def publish() -> None:
            if is_first:
                atomic_folder.publish(folder, tag, checksums, latest=latest, keep_last=self._options.keep_last)

        try:
            try:
                dcp.save(tensors, storage_writer=writer, planner=SavePlanner(), process_group=group)
            except CheckpointException as error:
                raise RuntimeError(_describe(error)) from None
            checksums: dict[str, list[int]] = {}
            for of_rank in gather_objects(writer.checksums, group):
                checksums |= of_rank
            run_on_all_ranks(publish, group)
        except Exception as error:
            text = f"checkpoint {folder / tag} was not saved, earlier ones are intact: {error}"
            if is_first:
                atomic_folder.abandon(folder, tag)
                logger.error(text)
            raise RuntimeError(text) from error

    def wait(self) -> None:
        """Wait until an asynchronous save is complete.

        Raises:
            RuntimeError: on all ranks, if the save failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Wait for an asynchronous save, and release the lock of the folder."""
        try:
            self.wait()
        finally:
            self._release_lock()
            if self._executor is not None:
                self._executor.shutdown()
                dist.destroy_process_group(self._group)

    # ---- load -------------------------------------------------------------------------------------------------------

    def find(
        self, load_dir: str | Path, tag: object, control: dist.ProcessGroup, *, lr_scheduler: Any
    ) -> Checkpoint | None:
        """Find and verify the checkpoint to load, without changing anything.

        Args:
            tag: name of the checkpoint. Default: the one in `latest`, or if that is damaged, the newest complete one.
            lr_scheduler: scheduler that is to load the stored state; None if there is none.

        Returns:
            None, with a warning, if the folder has no checkpoint.

        Raises:
            ValueError: on all ranks, if the checkpoint is missing, damaged, plain DeepSpeed's, or of another LR
                scheduler.
        """
        self.wait()
        folder, name = Path(load_dir), None if tag is None else str(tag)
        run_on_all_ranks(lambda: _refuse_foreign(folder, name), control)
        path = self._choose(folder, name, control)
        if path is None:
            if dist.get_rank() == 0:
                logger.warning("load_checkpoint: %s has no checkpoint, so nothing was loaded", folder)
            return None

        def read() -> dict[str, Any]:
            facts = read_bytes(files.Reader(path), COMMON)
            if hasattr(lr_scheduler, "state_dict"):
                _check_scheduler(lr_scheduler, facts["common"]["lr_scheduler"])
            return facts

        return Checkpoint(path, run_on_all_ranks(read, control))

    def restore(
        self,
        checkpoint: Checkpoint,
        state: RankState,
        *,
        optimizer_states: bool,
        own_state: bool,
        strict: bool,
    ) -> None:
        """Load a checkpoint that was saved with any layout.

        Args:
            optimizer_states: whether to load moments, step counts and options of the optimizer.
            own_state: whether to restore per-rank random state and buffers, if the layout is the same.
            strict: whether missing and unexpected tensors are errors.

        Raises:
            ValueError: on all ranks, before anything is changed, if the checkpoint is of a different model.
            RuntimeError: on all ranks, if a file cannot be read although it was verified; weights are then undefined.
        """
        control, facts, reader = state.groups.control, checkpoint.facts, files.Reader(checkpoint.path)

        def prepare() -> tuple[State, Moments | None, dict[str, Any] | None]:
            optimizer = facts["optimizer"] if optimizer_states else None
            boxes, moments = make_targets(state, stored_tensors(reader), optimizer, strict=strict)
            is_same = own_state and facts["layout"] == state.layout and facts["ranks"] == dist.get_world_size()
            return boxes, moments, read_bytes(reader, f"{RANK}/{dist.get_rank()}") if is_same else None

        def read() -> None:
            reader.read(LoadPlanner(), boxes)
            if moments is not None:
                restore_optimizer(state, moments, facts["optimizer"])

        boxes, moments, of_rank = run_on_all_ranks(prepare, control)
        run_on_all_ranks(read, control)
        state.optimizer.gather_weights()
        if of_rank is not None:
            restore_random_state(of_rank["random"])
            restore_buffers(state, of_rank["buffers"])

    def _choose(self, folder: Path, tag: str | None, control: dist.ProcessGroup) -> Path | None:
        """Choose the folder of the checkpoint to load."""
        is_first = dist.get_rank() == 0
        problems = list[str]()
        call = f"load {tag!r} from {folder}"
        tags = _gather(call, lambda: atomic_folder.tags_to_try(folder) if tag is None and is_first else [tag], control)
        for name in tags[0]:
            path = atomic_folder.path_of(folder, name)
            share = {"rank": dist.get_rank(), "size": dist.get_world_size()}
            of_ranks = gather_objects(files.problems_in(path, read=self._options.verify, **share), control)
            of_files = list(dict.fromkeys(problem for of_rank in of_ranks for problem in of_rank))
            if not of_files:
                if problems and is_first:
                    logger.warning("%s; loading %s", "; ".join(problems), path)
                return path
            problems += of_files[:3]
        if problems:
            raise ValueError(f"{folder} has no complete checkpoint{f' {tag!r}' if tag else ''}: {'; '.join(problems)}")
        return None


def _refuse_foreign(folder: Path, tag: str | None) -> None:
    """Raise ValueError for a checkpoint of plain DeepSpeed.

    Args:
        tag: name of the checkpoint. Default: the one in `latest`.
    """
    name = next(iter(atomic_folder.tags_to_try(folder)), None) if tag is None else tag
    if name is not None and any((folder / name).glob("*_optim_states.pt")):
        raise ValueError(
            f"{folder / name} is a ZeRO checkpoint of DeepSpeed; export its weights with zero_to_fp32.py, and start "
            "from them"
        )


def _check_scheduler(scheduler: Any, stored: Mapping[str, Any] | None) -> None:
    """Raise ValueError for the state of a different scheduler, which would silently restart or change this one. Later
    versions of a class may have more keys, or fewer, but hardly both."""
    here = scheduler.state_dict()
    if not stored:
        return
    only_stored, only_here = sorted(stored.keys() - here.keys()), sorted(here.keys() - stored.keys())
    if only_stored and only_here:
        raise ValueError(
            f"the checkpoint's LR scheduler has {quoted(only_stored)}, {type(scheduler).__name__} has "
            f"{quoted(only_here)}; use the saved class, or pass load_lr_scheduler_states=False"
        )


def _gather(call: str, work: Callable[[], Any], control: dist.ProcessGroup) -> list[Any]:
    """`gather_results` of ranks that make the same call; otherwise raise ValueError on all ranks."""
    calls, results = zip(*gather_results(lambda: (call, work()), control), strict=True)
    if other := next((rank for rank, of_rank in enumerate(calls) if of_rank != calls[0]), None):
        raise ValueError(
            f"checkpoint: rank 0 called {calls[0]}, rank {other} called {calls[other]}; make the same call on all ranks"
        )
    return list(results)


def _facts(state: RankState, numbers: Sequence[Any]) -> dict[str, Any]:
    """Everything that loading needs, except tensors.

    Args:
        numbers: `group_facts` of all ranks.
    """
    tensors: dict[str, torch.Tensor] = {**state.mask.parameters, **state.mask.buffers}
    return {
        "optimizer": optimizer_facts(state, numbers),
        "layout": state.layout,
        "ranks": dist.get_world_size(),
        "plan": json.dumps(state.mask.plan.to_json()),
        "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        "model": model_facts(state.model),
        "tied": tied_names(state.model),
    }


def plain_bytes(content: Mapping[str, Any]) -> bytes:
    """Bytes of `torch.save`, with tensors in host memory.

    Raises:
        ValueError: objects of types that `weights_only=True` cannot load.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(content), buffer)
        buffer.seek(0)
        plain = torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            "client_state and the state of the LR scheduler must be tensors, numbers, strings, lists and dicts; "
            f"{f'found {refused[1]}' if refused else str(error).splitlines()[0]}"
        ) from None
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def add_bytes(state: State, key: str, content: bytes) -> None:
    add_box(state, key, [len(content)], [0], torch.frombuffer(bytearray(content), dtype=torch.uint8))


def read_bytes(reader: files.Reader, key: str) -> dict[str, Any]:
    """Load what `plain_bytes` has saved."""
    stored = reader.read_metadata().state_dict_metadata
    if key not in stored:
        raise ValueError(f"{reader.path} has no {key!r}; expected a checkpoint of sdp_deepspeed")
    state: State = {}
    values = torch.empty(stored[key].size, dtype=torch.uint8, device="cpu")  # type: ignore[union-attr]
    add_box(state, key, values.shape, [0], values)
    reader.read(LoadPlanner(), state)
    content: dict[str, Any] = torch.load(io.BytesIO(values.numpy().tobytes()), map_location="cpu", weights_only=True)
    return content


def stored_tensors(reader: files.Reader) -> dict[str, Any]:
    """DCP's metadata of the tensors of a checkpoint, by key."""
    stored = reader.read_metadata().state_dict_metadata
    return {key: tensor for key, tensor in stored.items() if key != COMMON and not key.startswith(f"{RANK}/")}


def _describe(error: CheckpointException) -> str:
    texts: dict[str, list[int]] = {}
    for rank, (raised, _) in error.failures.items():
        texts.setdefault(str(raised), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
