"""What the scripts that the deepspeed launcher starts have in common: options, the device and its backend, and
one rank that writes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.common.device import backend, device_name, take_device
from benchmarks.common.provenance import write_result

Value = TypeVar("Value")


def option_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes; the script's docstring begins with its description."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--output", type=str, required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the launcher gives it
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    """Measure on all ranks; rank 0 writes what it got."""
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_device()
    deepspeed.init_distributed(backend())
    result = measure(arguments) | {"device": device_name()}
    if dist.get_rank() == 0:
        write_result(arguments.output, result)
    dist.barrier()
    dist.destroy_process_group()


def gather(value: Value) -> list[Value]:
    """Every rank's value on every rank; all of them call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def show(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
