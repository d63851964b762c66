"""What does a step take as ranks are added? Run it once with each number of ranks.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/scaling.py --output benchmarks/results/scaling_4_ranks.json

Strong: as many sequences in all, however many ranks share them. Weak: one sequence per rank. Where there are more ranks
than cores, seconds grow because ranks take turns; the CPU seconds of a rank (all of its threads, waiting that spins
too) and the bytes that it sends say what the ranks themselves add.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import Contestant
from benchmarks.common.models import num_parameters
from benchmarks.common.ranks import run, show
from benchmarks.common.refusing import refusing
from benchmarks.systems.group import measure
from benchmarks.systems.options import MODELS, parser_of, setting_of
from benchmarks.systems.subjects import BASELINE, Subject, possible
from sdp_deepspeed.config import MODES


def subjects(num_ranks: int) -> list[Subject]:
    """Few: what is added by ranks is much the same for the others. DDP is the fastest that holds the whole model."""
    ours = [Subject("DeepSpeed", Contestant(1, MODES[0], coverage)) for coverage in possible([1, 0.5], num_ranks)]
    return [Subject(BASELINE), Subject("DeepSpeed", Contestant(1)), Subject("FSDP2"), *ours]


def micro_batches(sequences: int, num_ranks: int) -> dict[str, int]:
    """Sequences of a rank, by way.

    Raises:
        ValueError: they cannot be shared out evenly.
    """
    if sequences % num_ranks:
        raise ValueError(f"--sequences: {sequences} cannot be shared by {num_ranks} ranks: give a multiple of that")
    return {"strong": sequences // num_ranks, "weak": 1}


def measure_ways(arguments: argparse.Namespace) -> dict[str, Any]:
    model, num_ranks = MODELS[arguments.model], dist.get_world_size()
    ways: dict[str, Any] = {}
    with refusing():
        asked = micro_batches(arguments.sequences, num_ranks)
    for way, micro_batch in asked.items():
        show(f"{way}, {micro_batch} per rank:")
        setting = setting_of(arguments, micro_batch)
        ways[way] = {"micro_batch": micro_batch, "subjects": measure(subjects(num_ranks), setting)}
    size = {"num_parameters": num_parameters(model)}
    return {
        "what": "scaling",
        "ranks": num_ranks,
        "model": model | size,
        "sequence_length": arguments.sequence,
        "arguments": vars(arguments),
        "ways": ways,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, default=8, help="of a step of strong scaling, of all ranks")
    run(parser, measure_ways)


if __name__ == "__main__":
    main()
