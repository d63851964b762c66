"""One rank of a small run that dies inside an operation: at a call, at a change of a file, or at a byte of one.

The moment is a number of things that the rank counts, so it is the same whenever the operation is the same.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint import files
from sdp_deepspeed.checkpoint.checkpointer import COMMON, read_bytes
from sdp_deepspeed.checkpoint.hugging_face import export
from sdp_deepspeed.checkpoint.random_state import random_state
from tests.helpers.checkpointed_runs import names_in, settings_of, stepped
from tests.helpers.models import LENGTH, SPECIMENS, VOCABULARY
from tests.helpers.training import dense_state, engine_of, micro_step

PATIENCE = timedelta(seconds=120)  # of ranks that wait for one that does not come to a call
KEEP_LAST = 2
CALLS, FILES, BYTES = KINDS = ("calls", "files", "bytes")
COUNTED = ("sdp_deepspeed", "torch.distributed", "safetensors")  # modules whose calls are moments


@dataclass(frozen=True)
class Death:
    """In the operation at the `number`th thing of a kind (from 1), at the latest when it is complete.

    Args:
        kind: `calls` by and of functions in `COUNTED`; `files` that are opened or changed; `bytes`: a file would
            become larger than `number`. The kernel ends the rank there, in the middle of a write.
    """

    rank: int
    kind: str
    number: int


@dataclass(frozen=True)
class Start:
    """One start of the run.

    Args:
        root: of all starts: `checkpoints`, `out` of exports, digests by step.
        folder: of this start.
        operation: a key of `OPERATIONS`.
        resumes: steps of which one must be loaded; 0 for no checkpoint.
    """

    root: Path
    folder: Path
    operation: str
    tag: str
    asynchronous: bool
    resumes: tuple[int, ...]
    death: Death | None

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def out(self) -> Path:
        return self.root / "exports" / "out"


def save(engine: Any, start: Start) -> None:
    engine.save_checkpoint(str(start.checkpoints), start.tag, {"step": engine.global_steps})
    engine.wait_for_checkpoint()


def load(engine: Any, start: Start) -> None:
    engine.load_checkpoint(str(start.checkpoints))


def replan(engine: Any, start: Start) -> None:
    for block in ({"strategy": "neuron"}, {"regime": "backward"}):
        engine.replan(block)


def export_live(engine: Any, start: Start) -> None:
    size = "8KB" if start.asynchronous else "1GB"  # over an export with other files
    engine.save_pretrained(start.out, max_shard_size=size)


def export_offline(engine: Any, start: Start) -> None:
    reader = files.Reader(files.path_of(start.checkpoints, start.tag))
    export(reader, read_bytes(reader, COMMON), start.out, max_shard_size="8KB")


OPERATIONS: dict[str, Callable[[Any, Start], None]] = {
    "save": save,
    "load": load,
    "replan": replan,
    "export": export_live,
    "offline_export": export_offline,
}


def run_rank(rank: int, size: int, start: Start) -> None:
    """Load, check, train a step, save; then the operation."""
    _redirect(rank, size, start)
    torch.set_num_threads(1)
    # Built at each start behind a lock on the disk, which would outlive a rank killed there; nothing here uses it.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None
    method = f"file://{start.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=PATIENCE)
    options = {"asynchronous": start.asynchronous, "keep_last": KEEP_LAST}
    engine = engine_of(settings_of(precision="bf16", checkpoint=options), SPECIMENS["llama"].build())
    torch.manual_seed(rank)
    np.random.seed(rank)

    path, client = engine.load_checkpoint(str(start.checkpoints))
    step = engine.global_steps
    assert step in start.resumes, (step, start.resumes, path)
    if client is not None:
        assert client["step"] == step
        assert_known(start, f"step {step} of rank {rank}", digest(engine))
    if rank == 0:
        _check_export(start)
    micro_step(engine, torch.randint(0, VOCABULARY, (2, LENGTH)))  # data come from the restored random numbers
    np.random.rand()
    assert_known(start, f"step {step + 1} of rank {rank}", digest(engine))
    if rank == 0:
        (start.folder / "step").write_text(str(step + 1))
    if "export" in start.operation:
        with (start.root / "dense").open("a") as known:
            print(digest_of(dense_state(engine)), file=known)
    if start.operation != "save":
        save(engine, start)
        _check_tidy(start)
    dist.barrier()
    with death(start, rank):
        OPERATIONS[start.operation](engine, start)
    dist.barrier()
    if start.operation == "save":
        _check_tidy(start)
    if rank == 0:
        _check_export(start, must_be=start.death is None and "export" in start.operation)
    dist.destroy_process_group()


@contextmanager
def death(start: Start, rank: int) -> Iterator[None]:
    """Count what happens; die where `start` says. Counts are in a file of each rank afterwards."""
    due = start.death if start.death is not None and start.death.rank == rank else None
    counts: Counter[str] = Counter()
    is_over = threading.Event()

    def count(kind: str, where: Callable[[], str]) -> None:
        counts[kind] += 1
        if due is not None and (due.kind, due.number) == (kind, counts[kind]):
            die(where())

    def die(where: str) -> None:
        (start.folder / "died").write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_call(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_globals.get("__name__", "").startswith(COUNTED):
            count(CALLS, lambda: f"{event} {getattr(argument, '__name__', '')} in {frame.f_code.co_qualname}")

    def on_file(event: str, arguments: tuple[Any, ...]) -> None:
        is_ours = event == "open" or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        if is_ours and not is_over.is_set() and _is_below(arguments[0], start.root):
            count(FILES, lambda: f"{event} {arguments[:2]}")

    sys.addaudithook(on_file)  # stays
    if due is not None and due.kind == BYTES:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (due.number, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    threading.setprofile(on_call)
    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        is_over.set()
    if due is not None:
        die("the end")
    written = f"*/__{rank}_*.distcp" if start.operation == "save" else "out/*.safetensors" if rank == 0 else "nothing"
    counts[BYTES] = max((path.stat().st_size for path in start.root.glob(f"*/{written}")), default=0)
    (start.folder / f"counts_{rank}.json").write_text(json.dumps(counts))


def _is_below(path: Any, root: Path) -> bool:
    """Inside shutil.rmtree paths are relative."""
    return isinstance(path, str | bytes | os.PathLike) and (
        not os.path.isabs(path) or os.fsdecode(path).startswith(str(root))
    )


def assert_known(start: Start, name: str, found: str) -> None:
    """The same as at the first time."""
    file = start.root / f"{name}.digest"
    if not file.exists():
        file.write_text(found)
    assert file.read_text() == found, f"{name} is another one"


def digest(engine: Any) -> str:
    """Of all that this rank goes on with: weights, masters, moments, schedule, random numbers."""
    numbers = random_state()
    facts = [engine.global_steps, engine.global_samples, engine.get_lr(), numbers["python"], np.random.get_state()]
    tensors = stepped(engine) | engine.held_tensors() | {"random": torch.get_rng_state()}
    return digest_of(tensors) + hashlib.sha256(repr(facts).encode()).hexdigest()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        result.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def _check_tidy(start: Start) -> None:
    """Nothing is left of what earlier starts did not complete."""
    names = names_in(start.checkpoints)
    assert files.LATEST in names
    assert len(names) <= KEEP_LAST + 1, names
    assert not [name for name in names if name.endswith((files.WRITING, files.REPLACED))], names


def _check_export(start: Start, *, must_be: bool = False) -> None:
    """An export that can be loaded has all values of one step. The offline one is complete or absent, and removed.

    Args:
        must_be: whether it must be complete, and of the last step.
    """
    found: Any = None
    refused: Exception | None = None
    if start.out.exists():
        try:
            found = AutoModelForCausalLM.from_pretrained(start.out, dtype="auto", local_files_only=True)
        except Exception as error:
            refused = error
    assert found is not None or not must_be, refused
    assert refused is None or start.operation != "offline_export", refused
    if found is not None:
        known = (start.root / "dense").read_text().split()
        assert digest_of(found.state_dict()) in known[-1 if must_be else 0 :], "the export has other values"
        if start.operation == "offline_export":
            shutil.rmtree(start.out)


def _redirect(rank: int, size: int, start: Start) -> None:
    """Errors to a file; where it hangs is in it, too."""
    errors = os.open(start.folder / f"rank_{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for; the rendezvous is a file
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
