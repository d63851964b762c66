"""How long until a dense loss is reached over a slow link? SDP beside ZeRO and DDP, by the clock. links.sh runs it.

Llamas over bytes of the standard library's Python files. Everybody reads the same text in the same order, at stage 1 or
2, and overlaps communication where it can. At C = 1/2 subnetworks are trained in the first half of the steps and the
whole model in the second, with a third more steps; a model of half the depth makes twice the steps: about as many
operations. The clock stops while the dense model is evaluated, on text that is not trained on. Runs come one after the
other, each is written when it is done, and the same command goes on after the last one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import CLIPPING, DDP, Contestant, PlainEngine, in_ddp
from benchmarks.common.device import seconds
from benchmarks.common.models import SMALL, num_parameters
from benchmarks.common.provenance import provenance, write_result
from benchmarks.common.ranks import found_before, option_parser, run, show
from benchmarks.learning.text import VOCABULARY, read_corpus, training_rows, validation_rows
from sdp_deepspeed.config import KEY, Mode

LENGTH = 128
SHAPE = SMALL | {"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}
MODE = Mode("forward", "block")


@dataclass(frozen=True)
class Run:
    """Who trains.

    Args:
        contestant: its coverage, unless there is a `half_until`.
        steps: as a share of plain ZeRO's.
        half_until: share of the steps at C = 1/2, before C = 1.
        num_layers: of the model.
    """

    contestant: Contestant
    steps: Fraction = Fraction(1)
    half_until: float | None = None
    num_layers: int = SHAPE["num_hidden_layers"]


RUNS = {
    "DDP": Run(DDP),
    "ZeRO-1": Run(Contestant(1)),
    "ZeRO-2": Run(Contestant(2)),
    "ZeRO-2, half the depth": Run(Contestant(2), Fraction(2), num_layers=SHAPE["num_hidden_layers"] // 2),
    "SDP + ZeRO-2, C = 1": Run(Contestant(2, MODE)),
    "SDP + ZeRO-2, C = 1/2, then dense": Run(Contestant(2, MODE), Fraction(4, 3), half_until=0.5),
}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of plain ZeRO and C = 1")
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), help="(default: all)")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--validation", type=int, default=64, help="rows of validation text")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--bucket", type=float, default=2e5, help="elements, of all who have buckets")
    run(parser, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs that are not in the output yet. Every rank calls it."""
    facts = {
        "what": "time_to_loss",
        "ranks": dist.get_world_size(),
        "link": os.environ.get("SDP_LINK_RATE"),
        "ranks_per_node": int(os.environ.get("LOCAL_SIZE", "1")),
        "model": SHAPE | {"num_parameters": num_parameters(SHAPE)},
    }
    facts["arguments"] = {name: value for name, value in vars(options).items() if name not in ("seeds", "only")}
    results = found_before(options.output, facts).get("results", [])
    done = {(row["name"], row["seed"]) for row in results}
    for seed, name in itertools.product(options.seeds, options.only):
        if (name, seed) not in done:
            results.append(curve(name, seed, options))
            if dist.get_rank() == 0:
                write_result(options.output, facts | {"results": results})
    return facts | {"results": results}


def curve(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steps, seconds of training and loss of the dense model, at each evaluation. Every rank calls it."""
    num_steps = int(options.steps * RUNS[name].steps)
    engine = build(RUNS[name], seed, num_steps, options)
    text, size = read_corpus("stdlib"), dist.get_world_size()
    held_out = validation_rows(text.validation, options.validation, LENGTH)[:, :LENGTH]
    points, taken = [], 0.0
    for step in range(num_steps):
        rows = training_rows(text.train, seed, step, size * options.micro_batch, LENGTH)[:, :LENGTH]
        own = rows.chunk(size)[dist.get_rank()]
        dist.barrier()
        start = seconds()
        engine.backward(engine(input_ids=own, labels=own, use_cache=False).loss)
        engine.step()
        dist.barrier()
        taken += seconds() - start
        if (step + 1) % options.every == 0 or step + 1 == num_steps:
            points.append([step + 1, taken, dense_loss(engine, held_out)])
    show(f"seed {seed}, {name}: {points[-1]}")
    engine.destroy()
    return {"name": name, "seed": seed, "steps": num_steps, "curve": points, "provenance": provenance()}


def build(run: Run, seed: int, num_steps: int, options: argparse.Namespace) -> Any:
    """An engine on a fresh model, the same on all ranks. Every rank calls it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": run.num_layers}))
    warm_up = {"total_num_steps": num_steps, "warmup_num_steps": max(2, num_steps // 20), "warmup_min_ratio": 0.0}
    if run.contestant == DDP:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=False)
        scheduler = WarmupCosineLR(optimizer, **warm_up)
        return PlainEngine(model, in_ddp(model, bucket=int(options.bucket)), optimizer, stage=0, scheduler=scheduler)
    config = run.contestant.config("fp32", bucket=int(options.bucket), overlap=run.contestant.stage == 2)
    config |= {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": options.rate, "torch_adam": True, "fused": False}},
        "scheduler": {"type": "WarmupCosineLR", "params": warm_up},
    }
    if run.half_until is not None:
        del config[KEY]["coverage"]
        phases = [{"until": run.half_until, "coverage": 0.5}, {"coverage": 1.0}]
        config[KEY] |= {"schedule": phases, "total_steps": num_steps}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


@torch.no_grad()
def dense_loss(engine: Any, rows: torch.Tensor) -> float:
    """Mean over the rows, of which each rank takes its part. Every rank calls it."""
    own = rows.chunk(dist.get_world_size())[dist.get_rank()]
    engine.eval()
    losses = [float(engine(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in own.split(4)]
    engine.train()
    total = torch.tensor([sum(losses), float(len(own))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
