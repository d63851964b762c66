"""`sdp data`: prepare the data of a config beforehand."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from sdp_deepspeed.command_parser import Parser, read_json, run_old_form
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.prepare import prepare_all
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.progress import BarProgress


def configure(parser: Parser) -> None:
    """Arguments of `sdp data`."""
    parser.description = (
        "Tokenize the corpus of a data config into its cache, where runs find it: for corpora that take longer than\n"
        "one wants to hold accelerators for, and for clusters without a shared file system (once on each node).\n"
        "If it is killed or interrupted, run the same command to continue."
    )
    parser.add_argument("config", type=Path, help="JSON: the data's settings, such as configs/data/quickstart.json")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for folder in prepare_all(DataConfig.from_dict(read_json(options.config, "config")), progress=BarProgress):
        print(f"{folder}: {PreparedData.load(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_old_form("data", configure))
