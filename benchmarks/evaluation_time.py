"""How long does an evaluation of the dense model take, and in how much memory: resident, prefetched, streamed?

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/evaluation_time.py \\
        --output benchmarks/results/evaluation_2_ranks.json

Ways take turns on one engine, so that each repeat pairs them; an evaluation begins and ends as in training. What is
resident is fetched in each evaluation's first batch. Memory is measured in evaluations of one batch, which are not
timed: the largest sum of all tensors that came to life in them. Losses must be the same bits. `--bandwidth` makes
collectives as slow as a network of so many bytes per second and rank would, beside whatever else goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import Contestant, engine_of, train
from benchmarks.common.device import seconds as now
from benchmarks.common.measured_step import watched_host_memory
from benchmarks.common.models import WIDE
from benchmarks.common.ranks import gather, option_parser, run, show
from sdp_deepspeed.config import MODES, Mode

WAYS = ("stream", "prefetch", "resident")
BASELINE = "stream"


@dataclass(frozen=True)
class Slowed:
    """A collective that ends no sooner than the network would let it."""

    work: Any
    end: float

    def wait(self, *limit: Any) -> Any:
        result = self.work.wait(*limit)
        time.sleep(max(0.0, self.end - time.monotonic()))
        return result


class Network:
    """`torch.distributed` with a network of so many bytes per second for each rank, one collective after the other."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, *splits: Any, **options: Any) -> Any:
        work = dist.all_to_all_single(received, sent, *splits, **options)
        start = max(self._free_at, time.monotonic())
        self._free_at = start + max(received.nbytes, sent.nbytes) / self._bandwidth
        return Slowed(work, self._free_at)


@contextmanager
def way_of(engine: Any, way: str) -> Iterator[None]:
    """Evaluate this way."""
    view = engine._applied.dense_view
    before, view._evaluation = view._evaluation, way
    yield
    view._evaluation = before


@torch.no_grad()
def evaluate(engine: Any, batches: list[torch.Tensor]) -> list[float]:
    """Losses of the batches."""
    engine.eval()
    losses = [engine(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
    engine.train()
    return [loss.item() for loss in losses]


def timed(engine: Any, batches: list[torch.Tensor]) -> tuple[float, list[float]]:
    """Seconds of the slowest rank, and this rank's losses."""
    dist.barrier()
    start = now()
    losses = evaluate(engine, batches)
    return max(gather(now() - start)), losses


def peak_of(engine: Any, batches: list[torch.Tensor]) -> int:
    """Bytes beside what lived before."""
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        evaluate(engine, batches)
        return torch.cuda.max_memory_allocated() - before
    with watched_host_memory() as memory:
        evaluate(engine, batches)
    return memory.peak


def measure_mode(mode: Mode, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways; a collective."""
    contestant = Contestant(1, mode, arguments.coverage)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (arguments.num_batches, arguments.batch, arguments.length)
    batches = list(torch.randint(0, WIDE["vocab_size"], shape, generator=generator))
    result: dict[str, Any] = {"mode": str(mode), "seconds": {way: [] for way in WAYS}, "peak": {}}
    with engine_of(WIDE, contestant.config("fp32", bucket=2_000_000)) as engine:
        batches = [batch.to(engine.device) for batch in batches]
        train(engine, batches[0])
        if arguments.bandwidth:
            engine.dp_group._dist = Network(arguments.bandwidth)
        known: list[float] = []
        for repeat in range(arguments.repeats + 1):  # the first warms up
            for way in WAYS:
                with way_of(engine, way):
                    seconds, losses = timed(engine, batches)
                known = known or losses
                if losses != known:
                    raise RuntimeError(f"{way}: losses {losses}, expected {known}")
                if repeat:
                    result["seconds"][way].append(seconds)
        for way in WAYS:
            with way_of(engine, way):
                result["peak"][way] = gather(peak_of(engine, batches[:1]))
        result["needs"] = gather(sum(part.num_bytes for part in engine._applied.mask.parts))
    show(f"{mode}: {result['seconds']}, {result['peak']}")
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    modes = [mode for mode in MODES if mode.regime == "forward"]
    facts = {"ranks": dist.get_world_size(), "model": WIDE, "arguments": vars(arguments), "baseline": BASELINE}
    return {"what": "evaluation", **facts, "results": [measure_mode(mode, arguments) for mode in modes]}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--num-batches", type=int, default=8, help="of an evaluation")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes per second and rank; 0: as fast as it is")
    run(parser, measure)


if __name__ == "__main__":
    main()
