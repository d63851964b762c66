"""What does a step hold, take and send, beside plain PyTorch's and stock DeepSpeed's? Everybody, in one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/side_by_side.py --output benchmarks/results/systems_4_ranks.json

DDP, with activation checkpointing too, ZeRO-0 to 3, FSDP2, and the method in its modes, coverages and stages. Engines
of all do not fit into memory together, so they come in groups: the plain ones, then one mode at one stage beside DDP
and plain DeepSpeed at that stage, then the method over FSDP2 and over DeepSpeed (`--only hosts`). Inside a group one
step of each alternates, in an order that rotates, and ratios are taken per repeat; in fp32 those that train the same
must have the same losses. With `--splits 0` benchmarks/namespaces.sh runs it over a slow link. benchmarks/systems says
what is counted (group.py), how a step is split (split.py) and what the fewest bytes are (bounds.py). Each group is
written when it is done, and a run goes on after the last one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.device import device_name
from benchmarks.common.models import num_parameters
from benchmarks.common.provenance import provenance, write_result
from benchmarks.common.ranks import run, show
from benchmarks.common.refusing import refusing
from benchmarks.common.resuming import found_before, lasting
from benchmarks.step_time import is_linked
from benchmarks.systems.group import measure
from benchmarks.systems.options import MODELS, parser_of, setting_of
from benchmarks.systems.subjects import BASELINE, STAGES, groups, possible
from sdp_deepspeed.config import MODES


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all groups have in common."""
    model = MODELS[arguments.model]
    return {
        "what": "side_by_side",
        "ranks": dist.get_world_size(),
        "baseline": BASELINE,
        "model": model | {"num_parameters": num_parameters(model)},
        "sequence_length": arguments.sequence,
        "device": device_name(),
        "link": os.environ.get("SDP_LINK_RATE"),
        "arguments": lasting(arguments, besides=("only",)),
    }


def check_splits(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: steps are to be split where ranks receive before they send: who waits at once would wait for ever.
    """
    if arguments.splits and is_linked():
        raise ValueError(f"--splits: got {arguments.splits} between namespaces, where no step can be split: give 0")


def measure_groups(arguments: argparse.Namespace) -> dict[str, Any]:
    """All groups that the output does not have yet."""
    of_this_run, path = facts(arguments), Path(arguments.output)
    with refusing():
        check_splits(arguments)
        done: dict[str, Any] = found_before(path, of_this_run).get("groups", {})
    setting = setting_of(arguments, arguments.micro_batch)
    modes = [mode for mode in MODES if str(mode) in arguments.modes]
    coverages = possible(arguments.coverages, dist.get_world_size())
    asked = groups(modes, arguments.stages, coverages)
    for name in (name for name in asked if name not in done and re.search(arguments.only, name)):
        show(f"{name} (load {os.getloadavg()[0]:.1f}):")
        before = {"commit": provenance()["commit"], "load": os.getloadavg()[0]}
        done[name] = before | {"subjects": measure(asked[name], setting)}
        if dist.get_rank() == 0:
            write_result(str(path), of_this_run | {"groups": done})
    show(f"{len(done)} of {len(asked)} groups are done")
    return of_this_run | {"groups": done}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(map(str, MODES)), default=list(map(str, MODES)))
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--coverages", type=float, nargs="+", default=[1, 0.75, 0.5, 0.25])
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--only", default="", help="groups whose name this expression finds, and the rest another time")
    run(parser, measure_groups)


if __name__ == "__main__":
    main()
