"""Loss of the dense model after training with data parallelism, alternatives and SDP at equal FLOPs.

    python benchmarks/study.py --output benchmarks/results/learning.json --budgets 500 1000 2000 --rates 0.006
    python benchmarks/study.py --output benchmarks/results/learning.json --only "dense 64x8" "C=1/[24].*" --seeds 0 1
    python benchmarks/study.py --costs --output benchmarks/results/recipe_costs.json

Virtual workers under the product's masks, in one process. Cells (study, subject, seed, budget, learning rate) are in
one JSON file, written after each; existing cells are not repeated. A subject's learning rate is tuned on a seed of its
own (--tune), and is the study's until then.

Costs are the memory and traffic of one rank of eight, from `sdp estimate`, for the rows of a worker as one micro-batch.
Data parallelism is SDP at C = 1 there, which sends the least that is possible.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.cells import TUNING_SEED, Store, named
from benchmarks.common.provenance import write_result
from benchmarks.common.workers import costs_of_step
from benchmarks.learning.cell import Cell, identity, run
from benchmarks.learning.plans import build
from benchmarks.learning.subjects import STUDIES, SUBJECTS, Study, Subject
from benchmarks.quality import LABELS, tuned_rate

RATE_FACTORS = (0.5, 1.0, 2.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.costs:
        write_result(options.output, {"what": "recipe_costs", "subjects": {name: costs(name) for name in LABELS}})
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    try:
        store = Store(options.output, "learning_study")
        asked = dict.fromkeys(cells(options, store))
        todo = [cell for cell in asked if not store.having(identity(cell, *_parts(cell)))]
        print(f"{len(todo)} cells to do", flush=True)
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for cell, result in pool.imap_unordered(run_cell, todo):
                store.add(asdict(cell), result)
                names = f"{cell.subject}, seed {cell.seed}, budget {cell.budget}"
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
    shown = [re.escape(name) for name in LABELS]
    add(
        "--only",
        nargs="+",
        default=shown,
        help="regular expressions of whole names (default: all in docs/results.md)",
    )
    add("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    add("--budgets", type=int, nargs="+", default=[1000], help="in dense steps of 0.41M parameters (default: 1000)")
    add("--tune", action="store_true", help=f"learning rates, on seed {TUNING_SEED}")
    add("--rates", type=float, nargs="+", help="highest learning rates, in place of the tuned ones, or of the grid")
    add("--costs", action="store_true", help="write memory and traffic of the subjects in docs/results.md instead")
    add("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace, store: Store) -> Iterator[Cell]:
    """Cells in the requested order: by seed, then by budget."""
    usual = STUDIES[options.study].learning_rate
    subjects = named(options.only, SUBJECTS)
    for seed, budget, name in product(options.seeds, options.budgets, subjects):
        if options.tune:
            rates = options.rates or [usual * factor for factor in RATE_FACTORS]
            yield from (Cell(options.study, name, TUNING_SEED, budget, rate) for rate in rates)
        else:
            tuned = tuned_rate(store.cells, options.study, name, budget) or usual
            yield from (Cell(options.study, name, seed, budget, rate) for rate in options.rates or [tuned])


def costs(name: str) -> dict[str, float]:
    """Peak bytes and sent bytes of a step."""
    study, subject = STUDIES["text"], SUBJECTS[name]
    model: Any = build(subject.size, 0)
    block, rows = subject.block or {"coverage": 1.0}, subject.rows or study.rows
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    return costs_of_step(model.config.to_dict(), block, rows, study.num_workers, optimizer, subject.size.length)


def run_cell(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    return cell, run(cell, *_parts(cell))


def _parts(cell: Cell) -> tuple[Study, Subject]:
    return STUDIES[cell.study], SUBJECTS[cell.subject]


if __name__ == "__main__":
    main()
