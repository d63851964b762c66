"""Save and resume on the same layout: each rank keeps what it holds and owns; complete or absent.

Written aside, synced and renamed, `latest` last, so that a torn checkpoint is never loaded and never hides the
last good one. Nothing is unpickled beyond tensors and plain values.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .engine import SubnetworkEngine

FORMAT = 2
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def save(engine: SubnetworkEngine, folder: str, tag: str, client_state: Mapping[str, Any], *, latest: bool) -> None:
    """Write `folder/tag`; every data-parallel rank calls it with the same arguments.

    Raises:
        ValueError: client state that could not be loaded again safely.
        RuntimeError: a rank could not write; the folder is then as it was before.
    """
    communicator = engine.everyone
    final, aside = Path(folder) / tag, Path(folder) / f".{tag}.writing"
    try:
        _together(engine, lambda: _prepare(aside) if communicator.rank == 0 else None)
        _together(engine, lambda: _write(aside / _file(communicator.rank), _state(engine, client_state)))
        _together(engine, lambda: _publish(engine, aside, final, latest) if communicator.rank == 0 else None)
    except BaseException:
        if communicator.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _together(engine: SubnetworkEngine, work: Callable[[], Any]) -> Any:
    """Run `work` on every rank; an error of one is raised on all."""
    error: Exception | None = None
    result = None
    try:
        result = work()
    except OSError as problem:
        error = RuntimeError(f"checkpoint: {problem.strerror or problem}: {problem.filename or ''}".rstrip(": "))
    except Exception as problem:
        error = problem
    engine.everyone.raise_together(error)
    return result


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _prepare(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write(path: Path, state: Mapping[str, Any]) -> None:
    with open(path, "wb", buffering=0) as raw:
        file: Any = _Remembering(raw)
        try:
            torch.save(state, file)
            os.fsync(raw.fileno())
        except (OSError, RuntimeError) as problem:  # torch's zip writer hides the disk's own error
            reason = file.error or problem
            words = reason.strerror if isinstance(reason, OSError) else str(reason).splitlines()[0]
            raise RuntimeError(f"checkpoint: cannot write {path}: {words}; earlier checkpoints are intact") from problem


class _Remembering:
    """A file that keeps the first error of its writes, and writes all that it is given."""

    def __init__(self, raw: io.RawIOBase | io.FileIO) -> None:
        self._raw = raw
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += self._raw.write(view[done:]) or 0
        except OSError as problem:
            self.error = self.error or problem
            raise
        return done

    def flush(self) -> None:
        self._raw.flush()


def _publish(engine: SubnetworkEngine, aside: Path, final: Path, latest: bool) -> None:
    engine.plan.save(aside / "plan.json")
    _sync_folder(aside)
    if final.exists():
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
        os.rename(aside, final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(aside, final)
    _sync_folder(final.parent)
    if latest:
        pointer = final.parent / ".latest.writing"
        pointer.write_text(final.name)
        os.replace(pointer, final.parent / "latest")
        _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _state(engine: SubnetworkEngine, client_state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        "client_state": dict(client_state),
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
    }
    _check_loadable(plain)
    return {
        "format": FORMAT,
        "layout": _layout(engine),
        "module": {name: tensor.detach() for name, tensor in engine.held_tensors().items()},
        "optimizer": engine.optimizer.state_dict(),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "random": _random_state(),
        **plain,
    }


def _check_loadable(plain: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as problem:
        raise ValueError(
            "checkpoint: client_state and the LR scheduler's state may hold tensors, numbers, strings, lists and dicts "
            f"only, so that loading never runs foreign code: {str(problem).splitlines()[0]}"
        ) from problem


def _layout(engine: SubnetworkEngine) -> dict[str, Any]:
    optimizer, plan = engine.optimizer, engine.plan
    ranks = list(plan.subnetwork_of_rank)
    return {
        "plan": plan.hash,
        # The hash does not cover it, and in the backward regime another subnetwork's file would fit. Without replicas
        # it is the same everywhere, and checkpoints of earlier versions have no such key.
        **({"placement": ranks} if len(ranks) > plan.num_subnetworks else {}),
        **({"tensor_parallel": shards.size} if (shards := engine.shards).size > 1 else {}),  # as for placement
        "ranks": engine.everyone.size,
        "rank": engine.everyone.rank,
        "zero_stage": optimizer.settings.stage,
        "dtype": str(engine.get_data_types()[0]),
        "stepped": optimizer.layout(),  # follows from the plan, the param groups and the bucket sizes
    }


def load(
    engine: SubnetworkEngine, folder: str, tag: str | None, **what: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Read what `save` wrote; every data-parallel rank calls it.

    Args:
        what: `optimizer_states`, `lr_scheduler_states`, `module_only`, as in DeepSpeed's `load_checkpoint`.

    Returns:
        Folder of the checkpoint and the client state; (None, None) if `folder` has no `latest`.

    Raises:
        ValueError: on all ranks, if the checkpoint is missing, damaged, or of another layout.
    """
    name = _together(engine, lambda: tag if tag is not None else _latest(folder))
    if name is None:
        return None, None
    path = Path(folder) / name
    _together(engine, lambda: _bring_back(path) if engine.everyone.rank == 0 else None)
    state = _together(engine, lambda: _read(engine, path))
    _restore(engine, state, **what)
    return str(path), state["client_state"]


def _bring_back(path: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    replaced = path.with_name(f".{path.name}.replaced")
    if not path.exists() and replaced.exists():
        os.rename(replaced, path)


def _latest(folder: str) -> str | None:
    pointer = Path(folder) / "latest"
    return pointer.read_text().strip() if pointer.is_file() else None


def _read(engine: SubnetworkEngine, path: Path) -> dict[str, Any]:
    file = path / _file(engine.everyone.rank)
    if not path.is_dir():
        raise ValueError(f"checkpoint: there is no folder {path}; give a tag that was saved, or none for the latest")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        found = len(list(path.glob("rank_*.pt")))
        raise ValueError(
            f"checkpoint: {file} is missing ({found} rank files are there, {engine.everyone.size} ranks run); a "
            "checkpoint resumes on the number of ranks that wrote it"
        ) from None
    except Exception as problem:
        raise ValueError(f"checkpoint: {file} is damaged: {str(problem).splitlines()[0]}") from problem
    if state.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {file} has format {state.get('format')!r}, this version reads {FORMAT}")
    saved, here = state["layout"], _layout(engine)
    keys = [key for key in here | saved if saved.get(key) != here.get(key)]
    wrong = [f"{key} was {saved.get(key)} and is {here.get(key)}" for key in keys]
    if wrong:
        raise ValueError(f"checkpoint: {path} was written on another layout: {'; '.join(wrong)}")
    return state


@torch.no_grad()
def _restore(
    engine: SubnetworkEngine,
    state: Mapping[str, Any],
    *,
    optimizer_states: bool = True,
    lr_scheduler_states: bool = True,
    module_only: bool = False,
) -> None:
    for name, tensor in engine.held_tensors().items():
        tensor.data.copy_(state["module"][name])
    if optimizer_states and not module_only:
        engine.optimizer.load_state_dict(state["optimizer"])
    else:
        engine.optimizer.refresh_fp32_params()
    if module_only:
        return
    if lr_scheduler_states and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    _restore_random(state["random"])


def _random_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = numpy_state
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }


def _restore_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
