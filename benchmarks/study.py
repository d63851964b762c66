"""Loss of the dense model after training with data parallelism, alternatives and SDP at equal FLOPs.

    python benchmarks/study.py --output benchmarks/results/learning.json --set recipes --rates 0.006 --workers 2
    python benchmarks/study.py --output benchmarks/results/learning.json --only "dense 64x8" "C=1/[24].*" --seeds 0 1

Virtual workers under the product's masks, in one process. Cells (study, subject, seed, budget, learning rate) are in
one JSON file, written after each; existing cells are not repeated. A subject's learning rate is tuned on a seed of its
own (--tune), and is the study's until then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import provenance
from benchmarks.learning.cell import Cell, identity, run
from benchmarks.learning.subjects import SETS, STUDIES, SUBJECTS, Study, Subject
from benchmarks.quality import TUNING_SEED, tuned_rate
from sdp_deepspeed.atomic_files import write_text

RATE_FACTORS = (0.5, 1.0, 2.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    try:
        store = Store(options.output)
        todo = [cell for cell in dict.fromkeys(cells(options, store)) if not store.has(identity(cell, *_parts(cell)))]
        print(f"{len(todo)} cells to do", flush=True)
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for result in pool.imap_unordered(run_cell, todo):
                store.add(result)
                names = f"{result['subject']}, seed {result['seed']}, budget {result['budget']}"
                print(f"{names}: {result['loss']:.4f} in {result['cpu_seconds']:.0f} s", flush=True)
    except (ValueError, OSError) as error:
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
    add("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
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
            raise ValueError(f"--only: no subject is named {pattern!r}; there are {', '.join(SUBJECTS)}")
        named |= dict.fromkeys(found)
    return list(named)


def run_cell(cell: Cell) -> dict[str, Any]:
    return run(cell, *_parts(cell))


def _parts(cell: Cell) -> tuple[Study, Subject]:
    return STUDIES[cell.study], SUBJECTS[cell.subject]


class Store:
    """All cells in one JSON file, replaced atomically.

    Raises:
        ValueError: the file exists and is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._provenance = provenance()  # of the code that runs; commits may follow
        self.cells: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("what") != "learning_study":
                raise ValueError(f"--output: {path} has figures of {content.get('what')!r}; name another file")
            self.cells = content["cells"]

    def has(self, facts: Mapping[str, Any]) -> bool:
        """Whether the cell is done with the current settings."""
        return any(all(found.get(key) == value for key, value in facts.items()) for found in self.cells)

    def add(self, result: Mapping[str, Any]) -> None:
        """Add a cell, or replace the one with the same names."""
        keys = ("study", "subject", "seed", "budget", "rate")
        self.cells = [found for found in self.cells if any(found[key] != result[key] for key in keys)]
        self.cells.append({**result, "provenance": self._provenance})
        self.cells.sort(key=lambda found: tuple(found[key] for key in keys))
        content = {"what": "learning_study", "cells": self.cells, "provenance": self._provenance}
        write_text(self._path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
