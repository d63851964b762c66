"""Repeat a cell of the image study with real ranks: DeepSpeed with ZeRO-1, the same plans, data and learning rates.

OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/image_ranks.py --data FOLDER --cell CELL.json --output RANKS.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.ranks import gather, option_parser, run, show
from benchmarks.images.cell import FIRST_LOSSES, Cell, Data, Settings, block_of, build, evaluate, identity, rate_share
from benchmarks.images.pictures import Augmented, read_examples
from benchmarks.images.subjects import SUBJECTS, Subject
from sdp_deepspeed.config import KEY


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files of Fashion-MNIST")
    parser.add_argument("--cell", type=Path, required=True, help="JSON file of image_study.py")
    parser.add_argument("--first", type=int, help="steps after which to stop (default: the cell's)")
    run(parser, repeat)


def repeat(options: argparse.Namespace) -> dict[str, Any]:
    result = json.loads(options.cell.read_text(encoding="utf-8"))
    cell = Cell(*(result[key] for key in ("subject", "images", "epochs", "seed", "rate")))
    subject, settings = SUBJECTS[cell.subject], Settings()
    if subject.dropped or subject.dropout or dist.get_world_size() != settings.workers:
        raise ValueError(f"{cell.subject} on {dist.get_world_size()} ranks: expected data parallelism or SDP, on 4")
    data = Data(*read_examples(options.data, cell.images))
    engine = start(cell, subject, settings)
    batches = Augmented(data.train, settings.workers * settings.rows, cell.seed)
    losses = []
    steps = min(options.first or result["steps"], result["steps"])
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = cell.rate * rate_share(step, result["steps"], settings.warm_up)
        pixels, labels = (tensor.chunk(settings.workers)[dist.get_rank()] for tensor in batches.batch(step))
        loss = cross_entropy(engine(pixel_values=pixels.to(engine.device)).logits, labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        if step < FIRST_LOSSES:
            losses.append(sum(gather(loss.item())) / settings.workers)
        if (step + 1) % 100 == 0:
            show(f"step {step + 1} of {steps}")
    with engine.dense():
        figures = evaluate(engine.module, data, settings) if dist.get_rank() == 0 else {}
        dist.barrier()
    curve = [{"step": steps, **figures}]
    return {"what": "image_ranks", **identity(cell, subject, settings), "first_losses": losses, "curve": curve}


def start(cell: Cell, subject: Subject, settings: Settings) -> Any:
    """The engine, with the weights of the cell's seed."""
    momentum = {"momentum": settings.momentum, "nesterov": True}
    config = {
        "train_micro_batch_size_per_gpu": settings.rows,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1 by default
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": cell.rate, "weight_decay": settings.weight_decay, **momentum}},
        "zero_optimization": {"stage": 1},
        KEY: block_of(subject, cell.seed),
    }
    return deepspeed.initialize(model=build(subject, cell.seed, settings), config=config)[0]


if __name__ == "__main__":
    main()
