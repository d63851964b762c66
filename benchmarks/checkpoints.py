"""How long do saving and loading a checkpoint take, beside ZeRO-1's, and how long does an asynchronous save block?

    deepspeed --num_gpus 4 benchmarks/checkpoints.py --output benchmarks/results/checkpoints_4_ranks.json

Contestants take turns, so that each repeat pairs them. SDP's checkpoint is on the disk when the call returns (fsync);
DeepSpeed's is left in the page cache, so a save "and sync" is measured too. Page caches are warm for all.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import BLOCK, Contestant, build_engine, train
from benchmarks.common.device import seconds as now
from benchmarks.common.models import MODELS, Shape
from benchmarks.common.ranks import option_parser, run
from sdp_deepspeed.config import KEY

FOLDER = Path("checkpoints_of_benchmark")  # removed afterward
CONTESTANTS = (Contestant(1), Contestant(1, BLOCK, 0.5))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="large")
    parser.add_argument("--repeats", type=int, default=3)
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = MODELS[arguments.model]
    seconds: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in CONTESTANTS}
    sizes = {}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for contestant in CONTESTANTS:
            folder = FOLDER / contestant.name.replace(" ", "_").replace("/", "_")
            times, sizes[contestant.name] = measure_one(contestant, model, folder)
            gc.collect()  # engines are in circles
            for what, value in times.items() if repeat else ():
                seconds[contestant.name].setdefault(what, []).append(value)
    facts = {"what": "checkpoints", "ranks": dist.get_world_size(), "model": model, "baseline": CONTESTANTS[0].name}
    return facts | {"seconds": seconds, "bytes": sizes}


def measure_one(contestant: Contestant, model: Shape, folder: Path) -> tuple[dict[str, float], int]:
    """Seconds of the slowest rank, and bytes on the disk. An asynchronous save blocks twice: the first one allocates
    the copy, and the second one counts."""
    config = contestant.config("bf16", bucket=20_000_000)
    engine = trained_engine(model, config)
    seconds = {"save": timed(lambda: engine.save_checkpoint(str(folder), tag="one"))}
    seconds["save and sync"] = seconds["save"] + timed(os.sync)
    seconds["load"] = timed(lambda: engine.load_checkpoint(str(folder), tag="one"))
    engine.destroy()
    if contestant.mode is not None:
        config[KEY]["checkpoint"] = {"asynchronous": True}
        other = trained_engine(model, config)
        other.save_checkpoint(str(folder), tag="two")
        other.wait_for_checkpoint()
        seconds["asynchronous save blocks"] = timed(lambda: other.save_checkpoint(str(folder), tag="two"))
        seconds["until it is on disk"] = seconds["asynchronous save blocks"] + timed(other.wait_for_checkpoint)
        other.destroy()
    size = sum(path.stat().st_size for path in (folder / "one").rglob("*"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return seconds, size


def trained_engine(model: Shape, config: dict[str, Any]) -> Any:
    """With an optimizer state to save."""
    engine = build_engine(model, config)
    train(engine, torch.randint(0, model["vocab_size"], (1, 16)))
    return engine


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = now()
    work()
    dist.barrier()
    return now() - start


if __name__ == "__main__":
    main()
