"""What survives when ranks are killed (kill -9) at random moments of save, load and step?

    python benchmarks/fault_injection.py --kills 200 --output benchmarks/results/faults.json

Two ranks train a tiny model and save after each step, every other start in the background. What a start resumes must
be at least the last step whose save had returned, and bit for bit the state of a run that was never stopped; ranks that
lose the other must end by themselves. tests/ranks/checkpoint/test_faults.py is the same with five kills.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from tests.helpers.fault_runs import Faults, Kill, Outcome, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=str, required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one start may take")
    arguments = parser.parse_args()
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), seed=arguments.seed, limit=arguments.limit)
        while sum(outcome.killed_at is not None for outcome in outcomes) < arguments.kills:
            outcomes.append(faults.cycle())
            _tell(len(outcomes), outcomes[-1].killed_at, outcomes[-1].problems)
        outcomes.append(faults.cycle(Kill((), "", 0)))  # the last kill, too, is followed by a start
    facts = {"what": "faults", "ranks": 2, "arguments": vars(arguments), "seconds": round(time.monotonic() - begun)}
    result = summary(outcomes)
    write_result(arguments.output, facts | result)
    sys.exit(1 if result["problems"] else 0)


def _tell(number: int, place: str | None, problems: list[str]) -> None:
    print(f"{number}: {place or 'ended by itself'}", *problems, sep="\n", flush=True)


if __name__ == "__main__":
    main()
