"""Memory, traffic and FLOPs of each recipe of the learning study: one rank of eight, from `sdp estimate`.

    python benchmarks/recipe_costs.py --output benchmarks/results/recipe_costs.json

ZeRO-1, fp32, the study's rows of a worker as one micro-batch; the rank with the most FLOPs. Data parallelism is SDP at
C = 1, which sends the least that is possible. docs/results.md shows them beside the losses.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import provenance
from benchmarks.learning.plans import build, phases
from benchmarks.learning.subjects import STUDIES, SUBJECTS, Size, Study, Subject
from benchmarks.quality import LABELS, NARROW
from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.forecast import forecast


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    study = STUDIES["text"]
    found = {name: costs_of(SUBJECTS[name], study) for name in (*LABELS, *NARROW)}
    content = {"what": "recipe_costs", "subjects": found, "provenance": provenance()}
    write_text(options.output, json.dumps(content, indent=1) + "\n")


def costs_of(subject: Subject, study: Study) -> list[dict[str, Any]]:
    """Of each phase of a run: its share of the steps, and of a step peak bytes, sent bytes and FLOPs of a rank."""
    rows = subject.rows or study.rows
    found = phases(subject)
    return [{"share": share, **_step(subject.size, block, rows, study.num_workers)} for share, block in found]


def _step(size: Size, block: dict[str, Any], rows: int, num_workers: int) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        KEY: block,
    }
    model: Any = build(size, 0)
    shape = model.config.to_dict()
    found = forecast(shape, config, num_ranks=num_workers, sequence_length=size.length)
    return {"peak": found.peak, "sent": found.rank.sent, "flops": found.flops}


if __name__ == "__main__":
    main()
