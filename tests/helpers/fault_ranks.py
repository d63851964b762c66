"""One rank of a small run that saves after each step and may die at any moment: its work, its log, its death.

A file per rank logs each thing before it is done, so that what a killed rank was doing is known.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sdp_deepspeed.checkpoint import files
from sdp_deepspeed.checkpoint.random_state import random_state
from tests.helpers.checkpointed_runs import names_in
from tests.helpers.models import LENGTH, VOCABULARY, config
from tests.helpers.training import engine_of, micro_step

KEEP_LAST = 2
STYLES: dict[str, Callable[[int], str]] = {
    "a tag per step": lambda step: f"step_{step}",
    "two tags in turn": lambda step: f"turn_{step % 2}",
    "one tag": lambda step: "only",
}


@dataclass(frozen=True)
class Start:
    """One start of the run.

    Args:
        folder: of the log of this start; `checkpoints` is beside it.
        style: how steps are named, a key of STYLES; None saves nothing.
        asynchronous: save in the background.
        num_steps: to make after what was loaded, at most.
        last: no step is made after this one.
        dies: the rank that kills itself, and at what; None for nobody.
    """

    folder: Path
    style: str | None
    asynchronous: bool = False
    num_steps: int = 4
    last: int = 20
    dies: tuple[int, Death] | None = None
    limit: float = 240.0  # seconds

    @property
    def checkpoints(self) -> Path:
        return self.folder.parent / "checkpoints"

    def settings(self) -> dict[str, Any]:
        keep = KEEP_LAST if self.style == "a tag per step" else None
        options = {"asynchronous": self.asynchronous, "keep_last": keep}
        warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 30}}
        block = config(holders=1, checkpoint=options)
        return block | {"bf16": {"enabled": True}, "scheduler": warmup}


@dataclass(frozen=True)
class Death:
    """Kill -9 right before something is done for the `count`th time (from 1).

    Args:
        place: a word of the log, or what is done to a file (`place_of`), or "bytes": with a file written by half.
    """

    place: str
    count: int


class Log:
    """What this rank is about to do, a line each, on the disk before it is done; and its death."""

    def __init__(self, start: Start, rank: int) -> None:
        self._file = os.open(log_path(start.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._death = start.dies[1] if start.dies is not None and start.dies[0] == rank else None
        self._root = str(start.checkpoints)
        self._count = 0

    def write(self, text: str) -> None:
        self._line(text)
        self.die_at(text.partition(" ")[0])

    def die_at(self, place: str) -> None:
        if self.is_due(place):
            self.die()

    def is_due(self, place: str) -> bool:
        """Whether death comes here; each call counts."""
        if self._death is None or place != self._death.place:
            return False
        self._count += 1
        return self._count == self._death.count

    def die(self) -> None:
        assert self._death is not None
        self._line(f"dies {self._death.place}")
        os.kill(os.getpid(), signal.SIGKILL)

    def watch_files(self) -> None:
        """From now on all that is done to files of checkpoints is a place to die at; threads too."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if (place := place_of(event, arguments, self._root)) is not None:
                self.die_at(place)

        sys.addaudithook(hook)
        written: Any = files._ChecksummedFile
        write = written.write

        def by_half(file: Any, data: Any) -> int:
            if self.is_due("bytes"):
                write(file, data[: len(data) // 2])
                file.flush()
                self.die()
            return int(write(file, data))

        written.write = by_half

    def _line(self, text: str) -> None:
        os.write(self._file, f"{time.monotonic()} {text}\n".encode())


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def place_of(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    """What an audit event of Python does to a checkpoint under `root`, None if it has nothing to do with one."""
    if event in ("os.remove", "os.rmdir"):  # inside shutil.rmtree paths are relative
        path = str(arguments[0])
        return "remove" if path.startswith(root) or not os.path.isabs(path) else None
    if not arguments or not str(arguments[0]).startswith(root):
        return None
    if event == "os.mkdir":
        return "prepare"
    if event == "os.rename":
        return _rename(str(arguments[0]), str(arguments[1]))
    return _open(str(arguments[0]), arguments[1]) if event == "open" else None


def _rename(source: str, target: str) -> str:
    if target.endswith(files.REPLACED):
        return "set aside"
    if target.endswith(files.WRITING):
        return "prune"
    named = {files.LATEST: "rename latest", files.INDEX: "index", files.CHECKSUMS: "checksums"}
    return named.get(target.rpartition("/")[2], "rename")


def _open(path: str, mode: str | None) -> str:
    if mode is None:
        return "sync"
    if "w" not in mode:
        return "read"
    name = path.rpartition("/")[2]
    return {f".{files.CHECKSUMS}.writing": "checksums", f".{files.LATEST}.writing": "latest"}.get(name, "write")


def run_rank(rank: int, size: int, start: Start) -> None:
    """What a process of this rank does; ends with an error if it loses the others or has another state than it says."""
    _redirect(start, rank, size)
    log = Log(start, rank)
    log.write("start")
    torch.set_num_threads(1)
    # Built at each start behind a lock on the disk, which would outlive a rank killed there; nothing here uses it.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None
    method, patience = f"file://{start.folder}/rendezvous", timedelta(seconds=start.limit / 3)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=patience)
    torch.manual_seed(0)
    engine = engine_of(start.settings())
    _seed(rank)
    log.watch_files()
    log.write("load")
    path, client = engine.load_checkpoint(str(start.checkpoints))
    position = 0 if client is None else client["position"]
    assert position == engine.global_steps, (position, engine.global_steps, path)
    log.write(f"loaded {position} {digest(engine)}")
    train(engine, start, log, position)
    log.write("end")
    dist.barrier()
    dist.destroy_process_group()


def train(engine: Any, start: Start, log: Log, position: int) -> None:
    """Steps from `position` on, each followed by a save."""
    for step in range(position + 1, min(start.last, position + start.num_steps) + 1):
        log.write(f"step {step}")
        micro_step(engine, torch.randint(0, VOCABULARY, (2, LENGTH)))  # data come from the restored random numbers
        torch.rand(1), np.random.rand(), random.random()
        if start.style is None:
            log.write(f"state {step} {digest(engine)}")
            continue
        log.write(f"save {step}")
        engine.save_checkpoint(str(start.checkpoints), STYLES[start.style](step), {"position": step})
        complete = step - 1 if start.asynchronous else step  # a save waits for the one before it
        log.write(f"saved {complete}")
        if not start.asynchronous:
            check_tidy(start)
    if start.style is not None and engine.global_steps > position:
        engine.wait_for_checkpoint()
        log.write(f"saved {engine.global_steps}")
        check_tidy(start)


def check_tidy(start: Start) -> None:
    """Nothing is left of what earlier starts did not complete."""
    names = set(names_in(start.checkpoints))
    tags = {name for name in names if not is_leftover(name)} - {files.LATEST}
    allowed = {"a tag per step": KEEP_LAST, "two tags in turn": 2, "one tag": 1}
    assert start.style is not None
    assert len(tags) <= allowed[start.style], names
    dist.barrier()  # nobody begins the next save before all have looked
    assert not [name for name in names if is_leftover(name)], names


def is_leftover(name: str) -> bool:
    return name.startswith(".") or name.endswith((files.WRITING, files.REPLACED))


def digest(engine: Any) -> str:
    """SHA-256 of all that this rank goes on with: weights, masters, moments, schedule, random numbers."""
    optimizer = engine.optimizer.optimizer
    tensors = list(engine.module.parameters())
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensors += [tensor, *(torch.as_tensor(value) for _, value in sorted(optimizer.state[tensor].items()))]
    result = hashlib.sha256(repr((engine.global_steps, engine.global_samples, engine.get_lr())).encode())
    for tensor in tensors:
        result.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    result.update(repr(random_state()["python"]).encode())
    result.update(repr(np.random.get_state()).encode())
    result.update(torch.get_rng_state().numpy().tobytes())
    return result.hexdigest()


def _seed(rank: int) -> None:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)


def _redirect(start: Start, rank: int, size: int) -> None:
    """Errors to a file beside the log; where it hangs is in it, too."""
    errors = os.open(start.folder / f"rank_{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.dump_traceback_later(start.limit * 0.9, file=sys.stderr)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for; the rendezvous is a file
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
