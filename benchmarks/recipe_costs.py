"""Memory and traffic of each recipe of the learning study: one rank of eight, from `sdp estimate`.

    python benchmarks/recipe_costs.py --output benchmarks/results/recipe_costs.json

ZeRO-1, fp32, the study's rows of a worker as one micro-batch; the rank with the most FLOPs. Data parallelism is SDP at
C = 1, which sends the least that is possible. docs/results.md shows them beside the losses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from benchmarks.common.workers import costs_of_step
from benchmarks.learning.plans import build
from benchmarks.learning.subjects import STUDIES, SUBJECTS
from benchmarks.quality import LABELS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    study, found = STUDIES["text"], {}
    for name in LABELS:
        subject = SUBJECTS[name]
        model: Any = build(subject.size, 0)
        block, rows = dict(subject.block or {"coverage": 1.0}), subject.rows or study.rows
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        shape, length = model.config.to_dict(), subject.size.length
        found[name] = costs_of_step(shape, block, rows, study.num_workers, optimizer, length)
    write_result(options.output, {"what": "recipe_costs", "subjects": found})


if __name__ == "__main__":
    main()
