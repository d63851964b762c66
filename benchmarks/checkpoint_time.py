"""Time to save and to load a checkpoint, ours and plain ZeRO-1's, paired on the same disk.

    deepspeed --num_gpus 4 benchmarks/checkpoint_time.py --output benchmarks/results/checkpoints_4_ranks.json

Contestants take turns, so that each repeat pairs them. Ours is on the disk when the call
returns (fsync) and is verified before it is loaded; DeepSpeed's is left in the page cache and is not verified, so a
save "and sync" is measured too. Page caches are warm for all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.contestants import PRECISIONS, Contestant, engine_of, train
from common.provenance import write_result

MODEL = Path(__file__).parents[1] / "configs" / "models" / "134M.json"
CONTESTANTS = {
    "ZeRO-1": (Contestant(1), 1.0),
    "SDP + ZeRO-1, C=1": (Contestant(1, "forward", "block"), 1.0),
    "SDP + ZeRO-1, C=1/2": (Contestant(1, "forward", "block"), 0.5),
}
BASELINE = "ZeRO-1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints_of_benchmark"), help="removed afterwards")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    model = json.loads(arguments.model.read_text())
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in CONTESTANTS}
    sizes = {}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for name, (contestant, coverage) in CONTESTANTS.items():
            for what, value in measure(contestant, coverage, model, arguments, name).items():
                if what == "bytes":
                    sizes[name] = value
                elif repeat:
                    seconds[name].setdefault(what, []).append(value)
    if dist.get_rank() == 0:
        facts = {"what": "checkpoints", "ranks": dist.get_world_size(), "model": model, "arguments": vars(arguments)}
        facts["arguments"] |= {"model": arguments.model.name, "folder": ""}
        write_result(arguments.output, facts | {"baseline": BASELINE, "seconds": seconds, "bytes": sizes})
    dist.barrier()
    dist.destroy_process_group()


def measure(
    contestant: Contestant, coverage: float, model: dict[str, Any], arguments: argparse.Namespace, name: str
) -> dict[str, float]:
    """Save, save behind the training (ours), sync, load: seconds of the slowest rank; bytes on the disk."""
    config = contestant.config(arguments.precision, bucket=20_000_000, coverage=coverage)
    folder = arguments.folder / name.replace("/", "_")
    result: dict[str, float] = {}
    with engine_of(model, config) as engine:
        train(engine, torch.randint(0, model["vocab_size"], (1, 16)))
        result["save"] = timed(lambda: engine.save_checkpoint(str(folder), tag="one"))
        result["save and sync"] = result["save"] + timed(os.sync)
        result["load"] = timed(lambda: engine.load_checkpoint(str(folder), tag="one"))
        if contestant.regime is not None:
            result["blocked by an asynchronous save"] = _blocked(engine, folder)
    result["bytes"] = sum(path.stat().st_size for path in (folder / "one").rglob("*"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return result


def _blocked(engine: Any, folder: Path) -> float:
    options = engine.block.checkpoint
    object.__setattr__(options, "asynchronous", True)
    try:
        seconds = timed(lambda: engine.save_checkpoint(str(folder), tag="two"))
        engine.wait_for_checkpoint()
    finally:
        object.__setattr__(options, "asynchronous", False)
    return seconds


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
