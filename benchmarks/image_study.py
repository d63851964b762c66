"""Loss and error on images after many epochs: data parallelism, its rivals and SDP at equal FLOPs.

    python benchmarks/image_study.py --data FOLDER --minutes 60
    python benchmarks/image_study.py --data FOLDER --only "18 blocks" "C = 1/2.*" --images 20000 --epochs 60 --seeds 0 1

FOLDER has the files of Fashion-MNIST (Debian: dataset-fashion-mnist). Virtual workers run under the product's masks in
one process. A cell is one JSON file; cells that exist are not repeated, so a call that was ended goes on where it was.
Learning rates are chosen for each subject in shorter runs, on training images that are held out, with a seed of their
own. Without --only, all stages run in the order in which they answer most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.cells import TUNING_SEED, Store, named
from benchmarks.images.cell import Cell, Data, Settings, identity, run
from benchmarks.images.pictures import read_examples
from benchmarks.images.subjects import STAGES, SUBJECTS, Stage

TUNING_IMAGES, TUNING_EPOCHS = 4_000, 60  # at most
RATES = (0.1, 0.2, 0.05)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    end = datetime.now(tz=UTC) + timedelta(minutes=min(options.minutes, 1e6))
    os.environ["OMP_NUM_THREADS"] = "1"  # which the figures name
    torch.set_num_threads(1)
    try:
        store, stages = Store(options.output, "image_study"), STAGES
        if options.only is not None:
            subjects = tuple(named(options.only, SUBJECTS))
            stages = [Stage(subjects, options.images, options.epochs, tuple(options.seeds))]
        for stage in stages:
            for cell in cells(stage, store):
                if datetime.now(tz=UTC) >= end:
                    return
                result = run(cell, SUBJECTS[cell.subject], Data(*read_examples(options.data, cell.images)))
                store.add(asdict(cell), result, file_of(cell))
                last = result["curve"][-1] if result["curve"] else {}
                print(json.dumps(asdict(cell) | last | {"cpu_seconds": result["cpu_seconds"]}), flush=True)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {options.output} has all finished cells")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    results = Path(__file__).parent / "results" / "images"
    add("--data", type=Path, required=True, help="folder of the published files of Fashion-MNIST")
    add("--output", type=Path, default=results, help="folder of cells (default: benchmarks/results/images)")
    add("--only", nargs="+", help="regular expressions of whole names of subjects, in place of all stages")
    add("--images", type=int, default=4_000, help="training images with --only (default: 4000)")
    add("--epochs", type=int, default=120, help="budget with --only, in epochs of all blocks (default: 120)")
    add(
        "--seeds", type=int, nargs="*", default=[0], help=f"with --only; none: only tune, on {TUNING_SEED} (default: 0)"
    )
    add("--minutes", type=float, default=math.inf, help="time after which no cell begins (default: none)")
    return parser.parse_args(arguments)


def cells(stage: Stage, store: Store) -> Iterator[Cell]:
    """Unfinished cells: one learning rate of all subjects after the other, then the same with seeds."""
    images, epochs = min(stage.images, TUNING_IMAGES), min(stage.epochs, TUNING_EPOCHS)
    todo = [*stage.subjects]
    while todo:
        rates = {subject: next_rate(tuning(store, subject, images, epochs)) for subject in todo}
        todo = [subject for subject in todo if rates[subject] is not None]
        yield from (Cell(subject, images, epochs, TUNING_SEED, rate) for subject, rate in rates.items() if rate)
    for seed in stage.seeds:
        for subject in stage.subjects:
            tried = tuning(store, subject, images, epochs)
            cell = Cell(subject, stage.images, stage.epochs, seed, min(tried, key=lambda rate: tried[rate]))
            if not store.having(identity(cell, SUBJECTS[subject], Settings())):
                yield cell


def tuning(store: Store, subject: str, images: int, epochs: int) -> dict[float, float]:
    """Loss on held-out images by learning rate."""
    facts = identity(Cell(subject, images, epochs, TUNING_SEED, 0.0), SUBJECTS[subject], Settings())
    del facts["rate"]
    found = store.having(facts)
    return {cell["rate"]: math.inf if cell["diverged"] else cell["curve"][-1]["held_out_loss"] for cell in found}


def next_rate(tried: dict[float, float]) -> float | None:
    """A learning rate to try: those of the grid, then beyond its ends while the best is at one; None if it is chosen.

    Args:
        tried: loss on held-out images of each learning rate.
    """
    for rate in RATES:
        if rate not in tried:
            return rate
    best = min(tried, key=lambda rate: tried[rate])
    if best == max(tried):
        return 2 * best
    return best / 2 if best == min(tried) else None


def file_of(cell: Cell) -> str:
    name = f"{cell.subject} {cell.images} x {cell.epochs} {cell.rate:g} {cell.seed}"
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()) + ".json"


if __name__ == "__main__":
    main()
