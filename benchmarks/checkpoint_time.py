"""How long does it take to save and to load a checkpoint, beside plain ZeRO-1's on the same disk; and how long does
training wait for one that is saved behind it?

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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import PRECISIONS, Contestant, engine_of, train
from benchmarks.common.device import seconds as now
from benchmarks.common.models import Shape
from benchmarks.common.ranks import option_parser, run
from sdp_deepspeed.config import Mode

MODEL = Path(__file__).parents[1] / "configs" / "models" / "134M.json"
FORWARD_BLOCK = Mode("forward", "block")
CONTESTANTS = {
    "ZeRO-1": Contestant(1),
    "SDP + ZeRO-1, C=1": Contestant(1, FORWARD_BLOCK, 1.0),
    "SDP + ZeRO-1, C=1/2": Contestant(1, FORWARD_BLOCK, 0.5),
}
BASELINE = "ZeRO-1"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = json.loads(arguments.model.read_text())
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in CONTESTANTS}
    sizes = {}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for name, contestant in CONTESTANTS.items():
            times, sizes[name] = measure_one(contestant, model, arguments, arguments.folder / name.replace("/", "_"))
            for what, value in times.items() if repeat else ():
                seconds[name].setdefault(what, []).append(value)
    facts = {"what": "checkpoints", "ranks": dist.get_world_size(), "model": model}
    kept = vars(arguments) | {"model": arguments.model.name, "folder": ""}
    return facts | {"arguments": kept, "baseline": BASELINE, "seconds": seconds, "bytes": sizes}


def measure_one(
    contestant: Contestant, model: Shape, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, float], int]:
    """Save, save in the background (ours), sync, load: seconds of the slowest rank; and bytes on the disk."""
    seconds: dict[str, float] = {}
    with engine_of(model, contestant.config(arguments.precision, bucket=20_000_000)) as engine:
        train(engine, torch.randint(0, model["vocab_size"], (1, 16)))
        seconds["save"] = timed(lambda: engine.save_checkpoint(str(folder), tag="one"))
        seconds["save and sync"] = seconds["save"] + timed(os.sync)
        seconds["load"] = timed(lambda: engine.load_checkpoint(str(folder), tag="one"))
        if contestant.mode is not None:
            seconds |= behind(engine, folder)
    size = sum(path.stat().st_size for path in (folder / "one").rglob("*"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return seconds, size


def behind(engine: Any, folder: Path) -> dict[str, float]:
    """Seconds that two saves in the background block, of which the first gets memory for its copy; and until the
    second is complete."""
    options = engine.block.checkpoint
    object.__setattr__(options, "asynchronous", True)
    try:
        first = timed(lambda: engine.save_checkpoint(str(folder), tag="two"))
        engine.wait_for_checkpoint()
        blocked = timed(lambda: engine.save_checkpoint(str(folder), tag="two"))
        rest = timed(engine.wait_for_checkpoint)
    finally:
        object.__setattr__(options, "asynchronous", False)
    return {
        "blocked by a first asynchronous save": first,
        "blocked by an asynchronous save": blocked,
        "asynchronous save": blocked + rest,
    }


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = now()
    work()
    dist.barrier()
    return now() - start


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints_of_benchmark"), help="removed afterward")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    run(parser, measure)


if __name__ == "__main__":
    main()
