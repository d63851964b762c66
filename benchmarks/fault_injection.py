"""What survives when ranks are killed (kill -9) at random moments of save, load and step, or an export?

    python benchmarks/fault_injection.py --kills 400 --output benchmarks/results/faults.json
    python benchmarks/fault_injection.py --kills 400 --ranks 4 --output benchmarks/results/faults_4_ranks.json

Ranks train a tiny model and save after each step, every other start in the background. What a start resumes must be at
least the last step whose save had returned, and bit for bit the state of a run that was never stopped; ranks that lose
another must end by themselves. Then half as many times the export of a checkpoint is killed: what it leaves must be
complete or absent, and the next run must end with the same files and tidy up.
tests/ranks/checkpoint/test_faults.py is the same with a few kills.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from tests.helpers.fault_files import FileFaults, FileOutcome
from tests.helpers.fault_runs import Faults, Kill, Outcome, summary
from tests.helpers.gpus import ON_THE_CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=str, required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--kills", type=int, default=400, help="of ranks; half as many of exports come after")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one start may take")
    arguments = parser.parse_args()
    os.environ |= ON_THE_CPU  # for all processes that are started; they ask for it when they import DeepSpeed
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), seed=arguments.seed, size=arguments.ranks, limit=arguments.limit)
        while sum(outcome.killed_at is not None for outcome in outcomes) < arguments.kills:
            outcomes.append(faults.cycle())
            _tell(len(outcomes), outcomes[-1].killed_at, outcomes[-1].problems)
        outcomes.append(faults.cycle(Kill((), "", 0)))  # the last kill, too, is followed by a start
        exports = _kill_exports(Path(folder), arguments.kills // 2, seed=arguments.seed)
    facts = {"what": "faults", "ranks": arguments.ranks, "arguments": vars(arguments)}
    facts["seconds"] = round(time.monotonic() - begun)
    result = summary(outcomes)
    result["problems"] += [problem for outcome in exports for problem in outcome.problems]
    result["kills_of_exports"] = sum(outcome.was_killed for outcome in exports)
    write_result(arguments.output, facts | result)
    sys.exit(1 if result["problems"] else 0)


def _kill_exports(folder: Path, count: int, *, seed: int) -> list[FileOutcome]:
    outcomes: list[FileOutcome] = []
    run = Faults(folder / "run", seed=seed)
    assert run.cycle(Kill((), "", 0)).problems == []
    faults = FileFaults(folder / "files", folder / "run" / "checkpoints", seed=seed)
    while sum(outcome.was_killed for outcome in outcomes) < count:
        outcomes.append(faults.cycle())
        _tell(len(outcomes), "export" if outcomes[-1].was_killed else None, outcomes[-1].problems)
    return outcomes


def _tell(number: int, place: str | None, problems: list[str]) -> None:
    print(f"{number}: {place or 'ended by itself'}", *problems, sep="\n", flush=True)


if __name__ == "__main__":
    main()
