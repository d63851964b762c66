"""Unlink the shared memory of DeepSpeed's CPU communication operator: 66 MiB per rank, which would outlive the run."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

SEGMENTS = "/dev/shm/deepspeed_allreduce_buffer_"  # + user, MASTER_ADDR, MASTER_PORT, rank


def patch_backend() -> None:
    """Unlink the segments of a run as soon as all of its ranks have mapped them, with and without our block."""
    from deepspeed import comm

    original = comm.TorchBackend.__init__
    if hasattr(original, "__wrapped__"):  # patched already
        return

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        unlink_segments()

    comm.TorchBackend.__init__ = __init__
    if comm.is_initialized():  # it was initialized before this import
        unlink_segments()


def unlink_segments() -> None:
    """Unlink the segments of this job's ranks; each rank calls it once, and the last one unlinks.

    No rank waits. The operator is active only if all ranks are on one machine, and each rank has mapped all segments
    when its constructor returns.
    """
    import torch.distributed as dist

    from sdp_deepspeed.parallel.groups import default_store

    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []
    segments = {line[line.index(SEGMENTS) :] for line in lines if SEGMENTS in line and not line.endswith(" (deleted)")}
    if not segments:
        return
    if default_store().add("sdp_deepspeed/mapped_segments", 1) == dist.get_world_size():
        for segment in segments:
            Path(segment).unlink(missing_ok=True)
