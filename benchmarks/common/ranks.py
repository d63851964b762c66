"""What scripts that a launcher starts on all ranks have in common: options, start, one rank that writes, resuming."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.common.device import backend, device_name, keep_freed_memory, take_device
from benchmarks.common.provenance import write_result

Value = TypeVar("Value")


def option_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes; the script's docstring begins with its description."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--output", type=str, required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the launcher gives it
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    """Measure on all ranks; rank 0 writes what it got. A ValueError, which all ranks must have, is one line of it."""
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_device()
    keep_freed_memory()
    deepspeed.init_distributed(backend())
    try:
        result = measure(arguments)
    except ValueError as error:
        raise SystemExit(f"error: {error}" if dist.get_rank() == 0 else 2) from None
    if dist.get_rank() == 0:
        write_result(arguments.output, result | {"device": device_name()})
    dist.barrier()
    dist.destroy_process_group()


def gather(value: Value) -> list[Value]:
    """Every rank's value on every rank; all of them call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def num_nodes() -> int:
    """Of this run. LOCAL_SIZE is the number of ranks per node (links.sh); by default 1."""
    return dist.get_world_size() // int(os.environ.get("LOCAL_SIZE", "1"))


def show(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def found_before(output: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the file has, on all ranks; empty if there is none. Every rank calls it.

    Args:
        facts: of this run; another run's file is not gone on with.

    Raises:
        ValueError: the file is of another run; on all ranks.
    """
    path, found = Path(output), dict[str, Any]()
    if dist.get_rank() == 0 and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    found = gather(found)[0]
    others = [name for name, value in facts.items() if found and found.get(name) != value]
    if others:
        raise ValueError(f"{path} is of a run with another {', '.join(others)}; name another file or remove this one")
    return found
