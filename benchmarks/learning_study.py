"""Is the model that comes out better at the same cost? Data parallelism, its rivals and the method over equal FLOPs.

python benchmarks/learning_study.py --output benchmarks/results/learning.json --minutes 60 --workers 2

Cells (study, subject, seed, budget) in one JSON; what is there already is not done again, so it can run in pieces of
any length; with --keep a piece may end within a cell. The learning rate of a subject is tuned on a seed of its own
(--tune), and the study's until then. On a GPU, a larger study in calls of nine minutes:

    python benchmarks/learning_study.py --output study.json --study "text 30M" --budgets 9155 --minutes 9 --keep kept
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.study.cell import Cell, identity, run
from benchmarks.study.pause import Resources
from benchmarks.study.rates import TUNING_SEED, tuned_rate
from benchmarks.study.store import Store
from benchmarks.study.subjects import STUDIES, SUBJECTS, Study, Subject
from sdp_deepspeed.command_parser import positive

RATE_FACTORS = (0.5, 1.0, 2.0)


def cells(options: argparse.Namespace, store: Store) -> Iterator[Cell]:
    """In the order in which they are asked for: by seed, then by budget."""
    if TUNING_SEED in options.seeds:
        raise ValueError(f"--seeds: {TUNING_SEED} is the seed of --tune, which no figure has")
    usual = STUDIES[options.study].learning_rate
    for seed, budget, name in product(options.seeds, options.budgets, _named(options.only)):
        if options.tune:
            rates = options.rates or [usual * factor for factor in RATE_FACTORS]
            yield from (Cell(options.study, name, TUNING_SEED, budget, rate) for rate in rates)
        else:
            tuned = tuned_rate(store.cells, options.study, name) or usual
            yield from (Cell(options.study, name, seed, budget, rate) for rate in options.rates or [tuned])


def _named(patterns: Sequence[str]) -> list[str]:
    """Subjects, in the order of the expressions that match their whole names."""
    named: dict[str, None] = {}
    for pattern in patterns:
        try:
            found = [name for name in SUBJECTS if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ValueError(f"--only: {pattern!r} is no regular expression: {error}") from None
        if not found:
            raise ValueError(f"--only: no subject is named {pattern!r}; --list shows all")
        named |= dict.fromkeys(found)
    return list(named)


def work(cells: Sequence[Cell], store: Store, pool: Executor, *, num_processes: int, resources: Resources) -> None:
    """All cells that are not done, or as many as begin in time; `num_processes` of `pool` at once.

    Raises:
        ValueError: a cell failed. None begins after it, and those that ran beside it are kept.
    """
    todo = [cell for cell in dict.fromkeys(cells) if not store.has(identity(cell, *_parts(cell)))]
    print(f"{len(cells) - len(todo)} cells are done, {len(todo)} to do", flush=True)
    running: dict[Future[dict[str, Any] | None], Cell] = {}
    failures: list[str] = []
    while todo or running:
        while todo and len(running) < num_processes and not resources.is_time_over and not failures:
            cell = todo.pop(0)
            running[pool.submit(run, cell, *_parts(cell), resources)] = cell
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            cell = running.pop(future)
            try:
                _keep(future.result(), store)
            except (ValueError, OSError, RuntimeError) as error:  # no memory on a GPU, a killed process
                failures.append(f"{cell.subject}, seed {cell.seed}, budget {cell.budget}: {error}")
    if failures:
        raise ValueError("; ".join(failures))
    if todo:
        print(f"out of time with {len(todo)} cells to do", flush=True)


def _keep(result: dict[str, Any] | None, store: Store) -> None:
    if result is None:
        print("out of time within a cell, which goes on from there next time", flush=True)
        return
    store.add(result)
    print(_line(result), flush=True)


def _parts(cell: Cell) -> tuple[Study, Subject]:
    """A cell's study, and its subject at the sizes of that."""
    study = STUDIES[cell.study]
    return study, study.scaled(SUBJECTS[cell.subject])


def _line(result: dict[str, Any]) -> str:
    names = f"{result['study']}: {result['subject']}, seed {result['seed']}, budget {result['budget']}"
    losses = f"{result['loss']:.4f} (best {result['best_loss']:.4f})"
    return f"{names}, rate {result['rate']:g}: {losses} in {result['cpu_seconds']:.0f} s"


def _be_a_worker() -> None:
    """One thread; an interrupt ends it without a word, as the parent has one."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _rate(text: str) -> float:
    """An argument's type."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1:
        raise argparse.ArgumentTypeError(f"expected a learning rate above 0 and below 1, got {text!r}")
    return rate


def _seed(text: str) -> int:
    """An argument's type: those of the text's generator and of dropout are made from it."""
    if not text.isdigit() or int(text) >= 10**9:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 999999999, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    """An argument's type."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return minutes


def _check_device(name: str) -> None:
    """
    Raises:
        ValueError: torch does not know it, or has none.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the JSON of all cells, which is read first")
    add("--study", choices=sorted(STUDIES), default="text", help="(default text)")
    add("--only", nargs="+", default=[".*"], help="regular expressions of whole names of subjects, in this order")
    add("--seeds", type=_seed, nargs="+", default=[0], help="(default 0)")
    size = "of the study's reference size, which has 0.42M parameters or those of the study's name"
    add("--budgets", type=positive, nargs="+", default=[1000], help=f"in dense steps {size} (default 1000)")
    add("--tune", action="store_true", help=f"learning rates, on seed {TUNING_SEED}, which no table has")
    add("--rates", type=_rate, nargs="+", help="highest learning rates, in place of the tuned ones, or of the grid")
    add("--minutes", type=_minutes, default=float("inf"), help="no cell begins later (default: none)")
    add("--keep", type=Path, help="a folder for cells within which the minutes end (default: they are finished)")
    device = "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"
    add("--device", default=device, help="cpu, cuda or cuda:1 (default: here %(default)s)")
    add("--workers", type=positive, default=1, help="processes of one thread each (default 1)")
    add("--list", action="store_true", help="names of the subjects, and nothing else")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    try:
        if options.list:
            print("\n".join(_named(options.only)))
            return
        _check_device(options.device)
        store = Store(options.output)
        chosen = list(cells(options, store))
        end = datetime.now(tz=UTC) + timedelta(minutes=min(options.minutes, 1e6))
        resources = Resources(options.device, end, options.keep)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=context, initializer=_be_a_worker) as pool:
            work(chosen, store, pool, num_processes=options.workers, resources=resources)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {options.output} has all cells that were done")


if __name__ == "__main__":
    main()
