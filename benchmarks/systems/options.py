"""Options that side_by_side.py and scaling.py share."""

from __future__ import annotations

import argparse

from benchmarks.common.models import MEDIUM, NARROW, SEQUENCE_LENGTH, SMALL
from benchmarks.common.ranks import option_parser
from benchmarks.systems.group import Setting, tokens

MODELS = {"small": SMALL, "medium": MEDIUM, "tiny": NARROW | {"num_hidden_layers": 2}}


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """For how much of whom; a script adds its own."""
    parser = option_parser(docstring)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--sequence", type=int, default=SEQUENCE_LENGTH, help="tokens of a sequence")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--bucket", type=float, default=2e6, help="elements, for all who have buckets")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each that are not kept")
    parser.add_argument("--repeats", type=int, default=9, help="steps of each that are timed")
    parser.add_argument("--splits", type=int, default=3, help="steps of each that are split into their parts")
    return parser


def setting_of(arguments: argparse.Namespace, micro_batch: int) -> Setting:
    """What is the same for all subjects."""
    shape = MODELS[arguments.model]
    return Setting(
        shape=shape,
        precision=arguments.precision,
        bucket=int(arguments.bucket),
        batch=tokens(shape, micro_batch, arguments.sequence),
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        splits=arguments.splits,
    )
