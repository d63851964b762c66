"""`sdp support`: the support matrix."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdp_deepspeed.command_parser import Parser, run_old_form
from sdp_deepspeed.support.matrix import BEGIN, END, markdown, write_matrix


def configure(parser: Parser) -> None:
    """Arguments of `sdp support`."""
    parser.description = (
        "Print what a DeepSpeed config may ask for together with subnetworks, what has no effect, and what is refused\n"
        "at start and why; then how many combinations of all settings are allowed. Markdown."
    )
    parser.add_argument(
        "file", type=Path, nargs="?", help=f"write it here instead, between the lines {BEGIN} and {END}"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.file is None:
        print(markdown())
    else:
        write_matrix(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(run_old_form("support", configure))
