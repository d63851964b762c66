"""How fast is an all-to-all of one rank with itself, by the alignment of what is sent and received? NCCL only.

`on_gpu.py bandwidth` runs it. The uneven all-to-all is what the exchange calls; with one rank NCCL copies on the GPU,
with the kernel that also serves messages to others.
"""

from __future__ import annotations

import itertools
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.device import device, device_events, seconds

OFFSETS = (0, 2, 4, 8, 16, 64, 128)  # bytes from an address that is a multiple of 512
SIZES = (2**16, 2**20, 2**24, 2**28)  # bytes
CALLS = 20  # between two looks at the clock


def why_not() -> str | None:
    """None where it can be measured."""
    if device().type != "cuda" or not dist.is_nccl_available():
        return "needs NCCL, and a GPU for it"
    return None


def measure(*, repeats: int) -> dict[str, Any]:
    """GB/s of each size and pair of offsets, and the kernels that ran."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device())
    try:
        rows = [
            {"bytes": size, "sent_offset": sent, "received_offset": received}
            | rate(size, sent, received, repeats=repeats)
            for size, (sent, received) in itertools.product(SIZES, pairs())
        ]
        return {"results": rows, "kernels": kernels(SIZES[0])}
    finally:
        dist.destroy_process_group()


def pairs() -> list[tuple[int, int]]:
    """Each offset on one side, and on both."""
    return sorted({pair for offset in OFFSETS for pair in ((0, offset), (offset, 0), (offset, offset))})


def rate(size: int, sent: int, received: int, *, repeats: int) -> dict[str, Any]:
    source, target = (part(size, offset) for offset in (sent, received))
    source.random_()
    all_to_all(target, source)
    assert torch.equal(target, source)
    rates = []
    for _ in range(repeats):
        start = seconds()
        for _ in range(CALLS):
            all_to_all(target, source)
        rates.append(CALLS * size / (seconds() - start) / 1e9)
    return {"gigabytes_per_second": rates, "median": median(rates)}


def part(size: int, offset: int) -> torch.Tensor:
    return torch.empty(size + max(OFFSETS), dtype=torch.uint8, device=device())[offset : offset + size]


def all_to_all(target: torch.Tensor, source: torch.Tensor) -> None:
    dist.all_to_all_single(target, source, [len(target)], [len(source)])


def kernels(size: int) -> list[str]:
    source, target = part(size, 0), part(size, 0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        all_to_all(target, source)
        seconds()
    return sorted({event.name for event in device_events(profiler)})
