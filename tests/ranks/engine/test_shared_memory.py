"""The shared memory of DeepSpeed's operator for CPUs outlives no run, however it ends."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

import sdp_deepspeed  # noqa: F401  (its import hook)
from sdp_deepspeed.engine.shared_memory import SEGMENTS
from tests.helpers.ranks import Rank
from tests.helpers.shared_memory import sweep_segments

pytestmark = pytest.mark.world(3)


def test_segments_are_mapped_and_unlinked(rank: Rank) -> None:
    run = rank.folder.parent.name
    os.environ |= {"LOCAL_SIZE": str(rank.size), "MASTER_PORT": run}  # as DeepSpeed's launcher does; names segments
    deepspeed.init_distributed()
    dist.barrier()
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if run in line}
    assert len(mapped) == rank.size
    assert all(path.startswith(SEGMENTS) and path.endswith(" (deleted)") for path in mapped), mapped
    total = torch.ones(3)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # elsewhere the operator is not used
        deepspeed.comm.inference_all_reduce(total)
        assert total.tolist() == [rank.size] * 3


def test_what_killed_ranks_leave_is_swept_and_nothing_else() -> None:
    names = [f"{SEGMENTS}{os.getuid()}_{uuid.uuid4()}_29500_{rank}" for rank in range(2)]
    stale, used = map(Path, names)
    stale.touch()
    with used.open("w"):
        sweep_segments()
        assert used.exists()
        assert not stale.exists()
    sweep_segments()
    assert not used.exists()
