"""What does a step of an image classifier hold, take and send, beside PyTorch's DDP's and stock ZeRO-1's?

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/vision.py --output benchmarks/results/vision_4_ranks.json

The method with ZeRO-1 in its four modes at C = 1/2, and in the forward regime at C = 1/4 where there are ranks for it.
fp32; SGD with Nesterov momentum. The images are random: a step's cost does not depend on what they show. All are
measured as in benchmarks/side_by_side.py: what each holds and sends in a step of its own, then steps that alternate in
an order that rotates, and ratios of the same repeat; DDP and ZeRO-1 must have the same losses.
"""

from __future__ import annotations

import argparse
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.ranks import option_parser, run, show
from benchmarks.common.refusing import refusing
from benchmarks.systems.group import Setting, measure
from benchmarks.systems.images import RESNET_18, image_subjects, random_images
from benchmarks.systems.subjects import BASELINE
from sdp_deepspeed.command_parser import read_json


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everybody, in one group."""
    with refusing():
        shape = RESNET_18 if arguments.model is None else read_json(arguments.model, "--model")
    name = "resnet18" if arguments.model is None else arguments.model.stem
    setting = Setting(
        shape=shape,
        precision="fp32",
        bucket=int(arguments.bucket),
        batch=random_images(arguments.micro_batch, arguments.size),
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        splits=0,
    )
    subjects, load = image_subjects(dist.get_world_size()), os.getloadavg()[0]
    size = sum(map(prod, subjects[0].dense_shapes(shape).values()))
    show(f"{name}, {size / 1e6:.1f}M parameters (load {load:.1f}):")
    return {
        "what": "vision",
        "ranks": dist.get_world_size(),
        "baseline": BASELINE,
        "model": shape | {"name": name, "num_parameters": size},
        "arguments": vars(arguments) | {"model": name},
        "load": load,
        "subjects": measure(subjects, setting),
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, help="JSON: a Transformers config with model_type (a ResNet-18)")
    parser.add_argument("--micro-batch", type=int, default=8, help="images of each rank")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--bucket", type=float, default=2e6, help="elements, for all who have buckets")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each that are not kept")
    parser.add_argument("--repeats", type=int, default=8, help="steps of each that are timed")
    run(parser, measured)


if __name__ == "__main__":
    main()
