"""Markdown tables from the raw figures under benchmarks/results.

python benchmarks/tables/make.py                # every result in full, with step times in ms
python benchmarks/tables/make.py mine.json      # one of your own
python benchmarks/tables/make.py --write        # the tables in benchmarks/README.md and README.md
python benchmarks/tables/make.py --plots        # its plots, which need the extra `plot`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository's root
from benchmarks.tables.balance import balance
from benchmarks.tables.counts import collectives, faults, model_state, peak_memory
from benchmarks.tables.gpu import bandwidth, sizes, steps, tests
from benchmarks.tables.learning import learning_study
from benchmarks.tables.links import link_rates, predicted_links
from benchmarks.tables.markdown import Result
from benchmarks.tables.plots import draw_all
from benchmarks.tables.readme import RESULTS, ROOT, filled
from benchmarks.tables.replans import replan_time
from benchmarks.tables.startup import startup, startup_time
from benchmarks.tables.systems import growth, scaling, side_by_side
from benchmarks.tables.time_to_loss import time_to_loss
from benchmarks.tables.times import checkpoint_time, host_time, step_time
from benchmarks.tables.vision import vision
from sdp_deepspeed.command_parser import read_json

IN_FULL: dict[str, Callable[[Result], str]] = {
    "checkpoints": checkpoint_time,
    "step_time": step_time,
    "link_rates": link_rates,
    "predicted_links": predicted_links,
    "time_to_loss": time_to_loss,
    "replan_time": replan_time,
    "host_time": host_time,
    "model_state": model_state,
    "peak_memory": peak_memory,
    "collectives": collectives,
    "balance": balance,
    "vision": vision,
    "learning_study": learning_study,
    "startup": startup,
    "startup_time": startup_time,
    "faults": faults,
    "side_by_side": side_by_side,
    "scaling": scaling,
    "growth": growth,
    "gpu_values": tests,
    "gpu_streams": tests,
    "gpu_steps": steps,
    "gpu_bandwidth": bandwidth,
    "gpu_sizes": sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(RESULTS.glob("*.json")))
    parser.add_argument(
        "--write", action="store_true", help="into benchmarks/README.md and README.md, and print nothing"
    )
    parser.add_argument("--plots", action="store_true", help="into benchmarks/results, and print nothing")
    options = parser.parse_args()
    if options.plots:
        try:
            draw_all()
        except ValueError as error:
            sys.exit(f"error: {error}")
    if options.write:
        for path in (ROOT / "benchmarks" / "README.md", ROOT / "README.md"):
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    if options.write or options.plots:
        return
    for path in options.files:
        try:
            result = read_json(path, "files")
        except ValueError as error:
            sys.exit(f"error: {error}")
        if result.get("what") not in IN_FULL:
            sys.exit(f"error: files: {path} has no figures of which there is a table")
        print(f"### {path.name}\n\n{IN_FULL[result['what']](result)}\n")


if __name__ == "__main__":
    main()
