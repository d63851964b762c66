"""How long does `engine.replan` take, beside the steps before it, and what does it send?

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/replan_time.py --output benchmarks/results/replan_4_ranks.json

Each repeat trains some steps under each coverage of a round trip and re-plans after them. Seconds are the slowest
rank's, from a barrier to the end, and so are those of each part; where ranks meet in a part, waiting is in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import PRECISIONS, Contestant, engine_of, train
from benchmarks.common.device import device
from benchmarks.common.device import seconds as now
from benchmarks.common.models import SEQUENCE_LENGTH, SMALL, num_parameters
from benchmarks.common.ranks import gather, option_parser, run
from sdp_deepspeed.config import MODES, Mode
from sdp_deepspeed.engine.replan_calls import ReplanCalls
from sdp_deepspeed.replan.transfer import Transfer

LIMIT = 10  # steps that a re-plan may take
# What is timed by itself: the search for the plan with all that could refuse it; what all ranks have, gathered; the
# module and the optimizer taken apart and put together; what stays on its rank; what goes to another one.
PARTS: dict[str, tuple[Any, str]] = {
    "plan": (ReplanCalls, "_choose"),
    "catalog": (ReplanCalls, "_before"),
    "rebuild": (ReplanCalls, "_rebuild"),
    "share": (ReplanCalls, "_share"),
    "move": (Transfer, "run"),
}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Seconds of this rank in each of PARTS, within the block."""
    found = dict.fromkeys(PARTS, 0.0)
    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), found, part)))
        yield found


def _timed(work: Callable[..., Any], found: dict[str, float], part: str) -> Callable[..., Any]:
    def go(*arguments: Any, **options: Any) -> Any:
        start = now()
        try:
            return work(*arguments, **options)
        finally:
            found[part] += now() - start

    return go


def slowest(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from a barrier to its end on the slowest rank, and what it returns here."""
    dist.barrier()
    start = now()
    result = work()
    return max(gather(now() - start)), result


def replanned(engine: Any, coverage: float) -> dict[str, Any]:
    """What one re-plan took and sent."""
    with timed_parts() as own:
        seconds, cost = slowest(lambda: engine.replan({"coverage": coverage}))
    parts = gather(own)
    return {
        "seconds": seconds,
        "parts": {part: max(of_rank[part] for of_rank in parts) for part in PARTS},
        "sent_bytes": cost.all_sent_bytes,
        "asked_bytes": cost.all_asked_bytes,
        "least_bytes": cost.least_bytes,
    }


def measure_stage(stage: int, coverages: Sequence[float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each change of coverage."""
    mode = Mode(*arguments.mode)
    config = Contestant(stage, mode, coverages[0]).config(arguments.precision, bucket=int(arguments.bucket))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(0, SMALL["vocab_size"], (1, SEQUENCE_LENGTH), generator=generator).to(device())
    rows: list[dict[str, Any]] = [
        {"stage": stage, "mode": str(mode), "from": before, "to": after, "steps": [], "replans": []}
        for before, after in zip(coverages, [*coverages[1:], coverages[0]], strict=True)
    ]
    with engine_of(SMALL, config) as engine:
        for repeat in range(arguments.repeats + 1):  # the first warms up
            for row in rows:
                steps = [slowest(lambda: train(engine, batch))[0] for _ in range(arguments.steps + 1)][1:]
                found = replanned(engine, row["to"])
                if repeat:
                    row["steps"].append(statistics.median(steps))
                    row["replans"].append(found)
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = [row for stage in arguments.stage for row in measure_stage(stage, arguments.coverages, arguments)]
    return {
        "what": "replan_time",
        "ranks": dist.get_world_size(),
        "limit": LIMIT,
        "model": SMALL | {"num_parameters": num_parameters(SMALL)},
        "sequence_length": SEQUENCE_LENGTH,
        "arguments": vars(arguments),
        "results": rows,
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2], choices=(0, 1, 2))
    parser.add_argument("--coverages", type=float, nargs="+", default=[0.5, 0.75, 1.0], help="one after another")
    parser.add_argument("--mode", nargs=2, default=list(MODES[0]), metavar=("REGIME", "STRATEGY"))
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--bucket", type=float, default=5e8, help="both kinds of buckets (elements)")
    parser.add_argument("--steps", type=int, default=10, help="before each re-plan")
    parser.add_argument("--repeats", type=int, default=10)
    run(parser, measure)


if __name__ == "__main__":
    main()
