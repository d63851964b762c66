"""What does a collective get out of a link? Seconds of each primitive over sizes, and the line through them.

    sudo env PATH="$PATH" benchmarks/namespaces.sh benchmarks/link_rates.py --output ...

Each rank sends the same number of bytes in all of them. "Late": the ranks come to it one after the other, in turn, as
they do in a training step; the time is that from the last one's arrival. A line through the medians of messages that
are large beside the burst of namespaces.sh gives seconds per collective (alpha) and bytes per second (beta), which
predict_links.py and the tables take (common/links.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.links import lines_of
from benchmarks.common.ranks import gather, option_parser, run, show
from benchmarks.common.refusing import refusing
from sdp_deepspeed.parallel.groups import HolderGroup, exchange

LATE = ", a rank late"  # ends the names of those to which one rank comes later


def primitives() -> dict[str, Callable[[int], Callable[[], None]]]:
    """By name what makes a collective in which each rank sends so many bytes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = HolderGroup(tuple(range(size)), dist.group.WORLD, rank)

    def all_to_all(num_bytes: int) -> Callable[[], None]:
        splits = [0 if peer == rank else num_bytes // (size - 1) for peer in range(size)]
        sent, received = (torch.zeros(sum(splits), dtype=torch.uint8) for _ in range(2))
        return lambda: dist.all_to_all_single(received, sent, splits, splits) and None

    def in_pairs(num_bytes: int) -> Callable[[], None]:
        sent, received = (torch.zeros((size, num_bytes // (size - 1)), dtype=torch.uint8) for _ in range(2))
        return lambda: exchange(received.unbind(), sent.unbind(), group)

    def all_reduce(num_bytes: int) -> Callable[[], None]:
        values = torch.zeros(num_bytes * size // (2 * (size - 1)) // 4)  # what a ring sends
        return lambda: dist.all_reduce(values) and None

    def all_gather(num_bytes: int) -> Callable[[], None]:
        own = torch.zeros(num_bytes // (size - 1), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(size)]
        return lambda: dist.all_gather(parts, own) and None

    def one_way(num_bytes: int) -> Callable[[], None]:
        values = torch.zeros(num_bytes, dtype=torch.uint8)

        def call() -> None:
            if rank < 2:
                dist.recv(values, 0) if rank else dist.send(values, 1)

        return call

    return {
        "one way": one_way,
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "all_to_all of gloo": all_to_all,
        "all_to_all, receives first": in_pairs,
    }


def timed(call: Callable[[], None], *, number: int, late: float) -> float:
    """Seconds from when the last rank comes until the last one is done; rank `number` comes later."""
    dist.barrier()
    start = time.perf_counter()
    if number % dist.get_world_size() == dist.get_rank():
        time.sleep(late)
    call()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken) - late


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with refusing():
        lines_of({"--sizes": {size: [float(size)] for size in arguments.sizes}})
    seconds: dict[str, dict[int, list[float]]] = {}
    for repeat in range(arguments.repeats + 1):
        for name, make in primitives().items():
            for late in (0.0, arguments.late):
                for num_bytes in arguments.sizes:
                    taken = timed(make(num_bytes), number=repeat, late=late)
                    of_size = seconds.setdefault(name + LATE * bool(late), {}).setdefault(num_bytes, [])
                    of_size += [taken] * bool(repeat)  # the first one warms up
    for name, link in lines_of(seconds).items():
        show(f"{name}: {1e3 * link.latency:.2f} ms and {link.bandwidth / 1e6:.1f} MB/s")
    return {
        "what": "link_rates",
        "ranks": dist.get_world_size(),
        "nodes": len(set(gather(os.environ.get("CROSS_RANK")))),
        "link": os.environ.get("SDP_LINK_RATE"),
        "arguments": vars(arguments),
        "seconds": seconds,
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2**n for n in (16, 18, 20, 21, 22, 23)], help="bytes sent"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--late", type=float, default=0.003, help="seconds that the late rank waits")
    run(parser, measure)


if __name__ == "__main__":
    main()
