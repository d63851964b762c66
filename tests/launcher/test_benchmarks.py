"""Benchmarks that a launcher starts, in small: they run to their end, and say what is asserted of their figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gpus import ON_THE_CPU
from tests.helpers.programs import launched

pytestmark = pytest.mark.slow

RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    output = folder / "raw.json"
    command = [sys.executable, *arguments, "--output", str(output)]
    with launched(command, folder / "log", **ON_THE_CPU) as running:
        code, said = running.finish()
    assert code == 0, said[-6000:]
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    assert result["provenance"]["versions"]["torch"]
    return result


def test_time_to_a_loss(tmp_path: Path) -> None:
    """Teams at C = 1 have the losses of torchft's DiLoCo after the same steps, at rates that rise and fall."""
    few = ("--steps", "6", "--every", "2", "--only")
    names = ("ZeRO-1", "torchft's DiLoCo + FSDP2, H = 5", "SDP teams + ZeRO-1, C = 1, H = 5")
    result = run(tmp_path, *RANKS, "benchmarks/time_to_loss.py", *few, *names)
    zero, diloco, teams = (row["curve"] for row in result["results"])
    assert [point[0] for point in zero] == [2, 4, 6]
    assert zero[0][2] - zero[-1][2] > 0.1, "it learns"
    assert [point[0] for point in diloco] == [point[0] for point in teams] == [10, 15]
    assert [point[2] for point in diloco] == pytest.approx([point[2] for point in teams], rel=1e-4)


def test_sizes_on_a_gpu(tmp_path: Path) -> None:
    """On the CPU, of a tiny model. Half of the blocks need half of their FLOPs, on both hosts."""
    result = run(tmp_path, "benchmarks/on_gpu.py", "sizes")
    flops = {cell["name"]: cell["flops"] for cell in result["results"]}
    dense = flops["DDP"]
    assert dense == flops["ZeRO-1"] == flops["FSDP2"]
    for host in ("ZeRO-1", "FSDP2"):
        half = flops[f"forward x block + {host} C=0.5"]
        assert 0.5 * dense < half < 0.6 * dense  # embeddings and head are everybody's
