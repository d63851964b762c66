"""What one more process group costs a rank over gloo: threads, open files and memory.

    torchrun --nproc-per-node 4 benchmarks/group_cost.py

The FSDP2 host makes a group for each distinct set of holders. Groups of two and of all ranks are made, and used once.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist

NUM_GROUPS = 16


def counts() -> tuple[int, int, float]:
    """Threads, open files, and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / 2**20
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident


def cost(ranks: list[int]) -> tuple[float, float, float]:
    """Of a group of these ranks, the mean of many."""
    before = counts()
    for _ in range(NUM_GROUPS):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            dist.all_gather_into_tensor(torch.empty(len(ranks) << 18), torch.empty(1 << 18), group=group)
    threads, files, resident = ((after - was) / NUM_GROUPS for after, was in zip(counts(), before, strict=True))
    return threads, files, resident


def main() -> None:
    dist.init_process_group("gloo")
    everyone = list(range(dist.get_world_size()))
    cost(everyone)  # what only the first ones pay
    for ranks in ([0, 1], everyone):
        threads, files, resident = cost(ranks)
        if dist.get_rank() == 0:
            print(f"a group of {len(ranks)}: {threads:g} threads, {files:g} open files, {resident:.2f} MiB resident")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
