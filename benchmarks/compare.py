"""What does a step hold, send and take? SDP beside DDP, ZeRO-0 to 3 and FSDP2, in one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/compare.py --output benchmarks/results/compare_4_ranks.json

One step of each contestant (common/contestants.py) alternates, in an order that rotates, so that times are paired:
ratios are taken per repeat. A time is the slowest rank's. What a contestant holds and sends is measured in a step of
its own (common/measured_step.py). Contestants that train the same must have equal losses.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import CONTESTANTS, Contestant, train
from benchmarks.common.device import device, device_name, seconds
from benchmarks.common.measured_step import live_tensors, measured_step
from benchmarks.common.models import SMALL, Shape, num_parameters
from benchmarks.common.ranks import gather, option_parser, run, show

LENGTH = 128
WARMUP = 3  # steps per contestant that are discarded
SAME_LOSS = 1e-5  # maximum difference of two that train the same in fp32, in each of the first steps


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="timed steps per contestant")
    run(parser, compare)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all contestants that so many ranks can have."""
    load = os.getloadavg()[0]
    show(f"load {load:.1f}")
    chosen = [row for row in CONTESTANTS if row.is_possible(dist.get_world_size())]
    return {
        "what": "compare",
        "device": device_name(),
        "ranks": dist.get_world_size(),
        "load": load,
        "model": SMALL | {"num_parameters": num_parameters(SMALL)},
        "rows": 1,
        "length": LENGTH,
        "repeats": options.repeats,
        "contestants": measure(chosen, SMALL, repeats=options.repeats),
    }


def measure(
    contestants: Sequence[Contestant], shape: Shape, *, repeats: int, length: int = LENGTH, bucket: int = 2_000_000
) -> dict[str, Any]:
    """By name: seconds of the slowest rank in each step, and per rank what it held and sent.

    Args:
        length: tokens of a rank in a step.
        bucket: its size in elements, where there are buckets.

    Raises:
        RuntimeError: on all ranks, if two contestants that should train the same do not.
    """
    batch = tokens(shape["vocab_size"], length)
    engines: dict[str, Any] = {}
    held: dict[str, Any] = {}
    with ExitStack() as stack:
        for contestant in contestants:
            gc.collect()
            gc.freeze()  # what is there now is no tensor of the next one
            engine = contestant.build(shape, "fp32", micro_batch=1, bucket=bucket)
            stack.callback(engine.destroy)
            engines[contestant.name] = engine
            held[contestant.name] = gather(held_and_sent(engine, batch))
            show(f"  {contestant.name}")
        check_losses(contestants, held)
        times = alternate(engines, batch, repeats)
        engines.clear()
    gc.unfreeze()
    gc.collect()
    return {name: {"seconds": times[name], "ranks": held[name]} for name in held}


def tokens(vocabulary: int, length: int) -> torch.Tensor:
    """Tokens of this rank, the same in every run: [1, length]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, vocabulary, (1, length), generator=generator).to(device())


def held_and_sent(engine: Any, batch: torch.Tensor) -> dict[str, Any]:
    """What this rank holds and sends in its third step, and its losses up to then."""
    losses = [train(engine, batch) for _ in range(2)]  # after two steps everything that is allocated once exists
    with measured_step(engine, others=live_tensors()) as figures:
        losses.append(train(engine, batch))
    kept = {name: getattr(figures, name) for name in ("weights", "gradients", "optimizer", "peak", "sent")}
    return kept | {"losses": list(map(float, losses))}


def check_losses(contestants: Sequence[Contestant], held: Mapping[str, Any]) -> None:
    """Check that contestants that should train the same do.

    Args:
        held: figures and losses of each rank, by name of the contestant.

    Raises:
        RuntimeError: a loss differs by more than SAME_LOSS.
    """
    first: dict[str, str] = {}
    for contestant in contestants:
        name = first.setdefault(contestant.trains, contestant.name)
        for one, two in zip(held[name], held[contestant.name], strict=True):
            for a, b in zip(one["losses"], two["losses"], strict=True):
                if not abs(a - b) <= SAME_LOSS:  # also for NaN
                    raise RuntimeError(f"{contestant.name} does not train what {name} does: loss {b}, not {a}")


def alternate(engines: dict[str, Any], batch: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Each repeat runs one step of every engine, in rotating order, so that drift of the machine affects all
    alike."""
    names = list(engines)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(WARMUP + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            taken = slowest(engines[name], batch)
            if repeat >= WARMUP:
                times[name].append(taken)
    return times


def slowest(engine: Any, batch: torch.Tensor) -> float:
    """Seconds of one step from a barrier to the step's end on the slowest rank."""
    dist.barrier()
    start = seconds()
    train(engine, batch)
    value = torch.tensor([seconds() - start], dtype=torch.float64, device=engine.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


if __name__ == "__main__":
    main()
