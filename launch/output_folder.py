"""The output folder of a run: lock it against a second run, and find the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerState

from recipe import fail
from sdp_deepspeed.checkpoint.files import CHECKSUMS
from sdp_deepspeed.config import KEY


def hold(folder: str | Path) -> None:
    """Lock the output folder for this run, or exit on all ranks if another run uses it.

    Collective after the process group has started. Rank 0's process holds the lock, and the kernel releases it when the
    process ends, however that happens. So a rank that outlives its launcher, to save, still holds the folder.
    """
    refusal: list[str | None] = [_lock(Path(folder)) if os.environ.get("RANK", "0") == "0" else None]
    if dist.is_initialized():
        dist.broadcast_object_list(refusal)
    if refusal[0] is not None:
        fail(f"training.output_dir: {refusal[0]}")


def _lock(folder: Path) -> str | None:
    """Lock a folder until this process ends. Returns the reason if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".in_use_by", os.O_RDWR | os.O_CREAT, 0o644)  # open, and locked, until the end
    except OSError as error:
        return f"{error}"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 1000).decode(errors="replace") or "another process"
        return f"{folder} is in use by {holder}; wait until it has ended, end it, or choose another folder"
    except OSError as error:
        print(f"warning: {folder}: {error.strerror}; nothing prevents a second run in it", file=sys.stderr, flush=True)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return None


def last_checkpoint(folder: str | Path) -> str | None:
    """Path of the newest complete checkpoint of the Trainer in a folder, or None. Its `trainer_state.json` is written
    last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def check_resumable(checkpoint: str, *, has_subnetworks: bool) -> None:
    """Exit if the Trainer's checkpoint is of the other kind: of plain DeepSpeed, or with subnetworks."""
    folder = Path(checkpoint)
    is_own, is_plain = (any(folder.glob(f"*/{files}")) for files in (CHECKSUMS, "mp_rank_*_model_states.pt"))
    if is_own and not has_subnetworks:
        fail(f"{folder} is of a run with {KEY}; remove sdp=off, or choose another training.output_dir")
    if has_subnetworks and is_plain and not is_own:
        fail(f"{folder} is of a run without {KEY}; add sdp=off, or choose another training.output_dir")
