"""Loss of the dense model after training with data parallelism, alternatives and SDP at equal FLOPs.

    python benchmarks/study.py --output benchmarks/results/learning.json --set recipes --rates 0.006 --workers 2
    python benchmarks/study.py --output benchmarks/results/learning.json --only "dense 64x8" "C=1/[24].*" --seeds 0 1

Virtual workers in one process. Cells (study, subject, seed, budget, learning rate) are in one JSON file, written after
each; existing cells are not repeated. With --keep a call may end within a cell, and the next one continues there, bit
for bit. A subject's learning rate is tuned on a seed of its own (--tune), and is the study's until then.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import provenance
from benchmarks.learning.cell import Cell, Resources, identity, run
from benchmarks.learning.subjects import SETS, STUDIES, SUBJECTS, Study, Subject
from benchmarks.quality import TUNING_SEED, tuned_rate
from sdp_deepspeed.atomic_files import write_text

RATE_FACTORS = (0.5, 1.0, 2.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    try:
        if options.list:
            print("\n".join(_named(options.only)))
            return
        store = Store(options.output)
        end = datetime.now(tz=UTC) + timedelta(minutes=min(options.minutes, 1e6))
        resources = Resources(end, options.keep)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=context, initializer=_start_worker) as pool:
            work(list(cells(options, store)), store, pool, num_processes=options.workers, resources=resources)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {options.output} has all finished cells")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of all cells; existing cells are not repeated")
    add("--study", choices=sorted(STUDIES), default="text", help="(default: text)")
    add("--set", choices=sorted(SETS), help="cells by one name, in place of --only, --seeds and --budgets")
    add("--only", nargs="+", default=[".*"], help="regular expressions of whole names of subjects, in this order")
    add("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    add("--budgets", type=int, nargs="+", default=[1000], help="in dense steps of 0.41M parameters (default: 1000)")
    add("--tune", action="store_true", help=f"learning rates, on seed {TUNING_SEED}")
    add("--rates", type=float, nargs="+", help="highest learning rates, in place of the tuned ones, or of the grid")
    add("--minutes", type=float, default=math.inf, help="time after which no cell begins (default: none)")
    add("--keep", type=Path, help="a folder for cells within which the minutes end (default: they are finished)")
    add("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
    add("--list", action="store_true", help="list the names of subjects and exit")
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace, store: Store) -> Iterator[Cell]:
    """Cells in the requested order: by seed, then by budget."""
    if TUNING_SEED in options.seeds:
        raise ValueError(f"--seeds: {TUNING_SEED} is the seed of --tune, which no figure has")
    usual = STUDIES[options.study].learning_rate
    asked = [
        (budget, name, seed) for seed, budget, name in product(options.seeds, options.budgets, _named(options.only))
    ]
    for budget, name, seed in SETS[options.set] if options.set else asked:
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
        found = [name for name in SUBJECTS if re.fullmatch(pattern, name)]
        if not found:
            raise ValueError(f"--only: no subject is named {pattern!r}; --list shows all")
        named |= dict.fromkeys(found)
    return list(named)


def work(cells: Sequence[Cell], store: Store, pool: Executor, *, num_processes: int, resources: Resources) -> None:
    """Run the unfinished cells that begin in time, `num_processes` of `pool` at once.

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
                result = future.result()
            except (ValueError, OSError, RuntimeError) as error:  # such as no memory on a GPU, or a killed process
                failures.append(f"{cell.subject}, seed {cell.seed}, budget {cell.budget}: {error}")
                continue
            if result is not None:
                store.add(result)
            outcome = f"{result['loss']:.4f} in {result['cpu_seconds']:.0f} s" if result else "continues next time"
            print(f"{cell.subject}, seed {cell.seed}, budget {cell.budget}: {outcome}", flush=True)
    if failures:
        raise ValueError("; ".join(failures))
    if todo:
        print(f"out of time with {len(todo)} cells to do", flush=True)


def _parts(cell: Cell) -> tuple[Study, Subject]:
    return STUDIES[cell.study], SUBJECTS[cell.subject]


def _start_worker() -> None:
    """Set up a process of one thread; interrupts end it silently, since the parent reports them."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Store:
    """All cells in one JSON file, replaced atomically; several processes may add to it.

    Raises:
        ValueError: the file exists and is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._provenance = provenance()  # of the code that runs; commits may follow
        self.cells: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._read()

    def has(self, facts: Mapping[str, Any]) -> bool:
        """Whether the cell is done with the current settings."""
        return any(all(found.get(key) == value for key, value in facts.items()) for found in self.cells)

    def add(self, result: Mapping[str, Any]) -> None:
        """Add a cell, or replace the one with the same names; keep what others have written."""
        keys = ("study", "subject", "seed", "budget", "rate")
        with self._alone():
            self._read()
            self.cells = [found for found in self.cells if any(found[key] != result[key] for key in keys)]
            self.cells.append({**result, "provenance": self._provenance})
            self.cells.sort(key=lambda found: tuple(found[key] for key in keys))
            content = {"what": "learning_study", "cells": self.cells, "provenance": self._provenance}
            write_text(self._path, json.dumps(content, indent=1) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the folder, since each writer replaces the file."""
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _read(self) -> None:
        if self._path.exists():
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content.get("what") != "learning_study":
                raise ValueError(f"--output: {self._path} has figures of {content.get('what')!r}; name another file")
            self.cells = content["cells"]


if __name__ == "__main__":
    main()
