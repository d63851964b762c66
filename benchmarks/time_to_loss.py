"""How long until a dense loss is reached over a slow link? SDP beside ZeRO, DDP and torchft's DiLoCo, by the clock.
links.sh runs it.

Llamas over bytes of the standard library's Python files. Everybody reads the same text in the same order, at stage 1 or
2, and overlaps communication where it can. SDP at C = 1/2 makes a third more steps than ZeRO, a model of half the depth
(with about as many operations) and DiLoCo twice as many. DiLoCo averages weights every H steps, and is evaluated after
that. At C = 1/2 all subnetworks have the first and the last layer.

The clock stops while the dense model is evaluated, on text that is not trained on. Memory is measured afterwards, in a
step that ends with a synchronization. Runs come one after the other, each is written when it is done, and the same
command goes on after the last one. DiLoCo needs `pip install -e ".[benchmarks]"`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import sys
from contextlib import nullcontext
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
import sdp_deepspeed
from benchmarks.common.contestants import CLIPPING, DDP, Contestant, PlainEngine, in_ddp
from benchmarks.common.device import seconds
from benchmarks.common.diloco import DiLoCoEngine
from benchmarks.common.measured_step import live_tensors, measured_step
from benchmarks.common.models import SMALL, num_parameters
from benchmarks.common.provenance import provenance, write_result
from benchmarks.common.ranks import found_before, gather, num_nodes, option_parser, run, show
from benchmarks.learning.text import VOCABULARY, read_corpus, training_rows, validation_rows
from sdp_deepspeed.config import KEY, Mode

LENGTH = 128
WIDTH = 96
SHAPE = SMALL | {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "initializer_range": math.sqrt(2 / (5 * WIDTH)),  # as in benchmarks/learning, for narrow models
}
MODE = Mode("forward", "block")


@dataclass(frozen=True)
class Run:
    """Who trains.

    Args:
        steps: as a share of plain ZeRO's.
        num_layers: of the model.
    """

    contestant: Contestant
    steps: Fraction = Fraction(1)
    num_layers: int = SHAPE["num_hidden_layers"]


def _runs() -> dict[str, Run]:
    runs = {
        "DDP": Run(DDP),
        "ZeRO-1": Run(Contestant(1)),
        "ZeRO-2, half the depth": Run(Contestant(2), Fraction(2), SHAPE["num_hidden_layers"] // 2),
        "SDP + ZeRO-2, C = 1": Run(Contestant(2, MODE)),
        "SDP + ZeRO-2, C = 1/2": Run(Contestant(2, MODE, 0.5), Fraction(4, 3)),
    }
    for every in (5, 10, 30):
        runs[f"torchft's DiLoCo + FSDP2, H = {every}"] = Run(Contestant(3, host="DiLoCo", every=every), Fraction(2))
    return runs


RUNS = _runs()


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of plain ZeRO and C = 1")
    parser.add_argument("--every", type=int, default=15, help="steps between two evaluations")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of training after which a run ends")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
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
        "nodes": num_nodes(),
        "model": SHAPE | {"num_parameters": num_parameters(SHAPE)},
    }
    facts["arguments"] = {
        name: value for name, value in vars(options).items() if name not in ("seeds", "only", "limit")
    }
    results = found_before(options.output, facts).get("results", [])
    done = {(row["name"], row["seed"]) for row in results}
    for seed, name in itertools.product(options.seeds, options.only):
        if (name, seed) not in done:
            results.append(measure_run(name, seed, options))
            if dist.get_rank() == 0:
                write_result(options.output, facts | {"results": results})
    return facts | {"results": results}


def measure_run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The curve of a run, what it sent over the links, and its memory. Every rank calls it.

    Returns:
        "curve": steps, seconds of training and loss of the dense model, at each evaluation. "steps": of the whole run,
        which may have ended by its time limit. By rank: "link_bytes" that its node sent, None without links;
        "seconds_synchronizing"; "peak" and "sent", bytes in a step that ends with a synchronization.
    """
    every, load = RUNS[name].contestant.every, os.getloadavg()[0]
    num_steps = math.ceil(options.steps * RUNS[name].steps / every) * every
    data = _Data(seed, options)
    gc.collect()
    gc.freeze()  # what is there now is no tensor of the engine
    engine = build(RUNS[name], seed, num_steps, options)
    points: list[list[float]] = []
    sent = 0
    ends = [*range(0, num_steps, math.lcm(options.every, every)), num_steps]
    for first, end in itertools.pairwise(ends):
        dist.barrier()
        start, sent_before = seconds(), _sent_over_link()
        for step in range(first, end):
            train(engine, data.training(step))
        dist.barrier()
        taken = max(gather(seconds() - start))
        sent += _sent_over_link() - sent_before
        points.append([end, taken + (points[-1][1] if points else 0.0), dense_loss(engine, data.validation)])
        if points[-1][1] > options.limit:
            break
    result = {"name": name, "seed": seed, "steps": num_steps, "curve": points, "load": load, "provenance": provenance()}
    result["link_bytes"] = gather(sent) if "SDP_LINK_RATE" in os.environ else None
    result["seconds_synchronizing"] = gather(getattr(engine, "seconds_synchronizing", 0.0))
    for step in range(every - 1):
        train(engine, data.training(step))
    with measured_step(engine, others=live_tensors()) as figures:
        train(engine, data.training(every - 1))
    result["peak"], result["sent"] = gather(figures.peak), gather(figures.sent)
    show(f"seed {seed}, {name} (load {load:.1f}): {points[-1]}, peak {max(result['peak']) / 2**20:.1f} MiB")
    engine.destroy()
    gc.unfreeze()
    return result


class _Data:
    """Rows of this rank, [rows, LENGTH].

    Attributes:
        validation: its part of the validation text.
    """

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        text = read_corpus("stdlib")
        self._text, self._seed, self._num_rows = text.train, seed, dist.get_world_size() * options.micro_batch
        self.validation = self._of_rank(validation_rows(text.validation, options.validation, LENGTH))

    def training(self, step: int) -> torch.Tensor:
        return self._of_rank(training_rows(self._text, self._seed, step, self._num_rows, LENGTH))

    def _of_rank(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :LENGTH].chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: Any, rows: torch.Tensor) -> None:
    engine.backward(engine(input_ids=rows, labels=rows, use_cache=False).loss)
    engine.step()


def _sent_over_link() -> int:
    """Bytes that this rank's node has sent, by the link's counter; 0 without links."""
    if "SDP_LINK_RATE" not in os.environ:
        return 0
    return int(Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics", "tx_bytes").read_text())


def build(run: Run, seed: int, num_steps: int, options: argparse.Namespace) -> Any:
    """An engine on a fresh model, the same on all ranks. Every rank calls it."""
    contestant, bucket = run.contestant, int(options.bucket)
    torch.manual_seed(seed)
    with sdp_deepspeed.Init() if contestant.coverage < 1 else nullcontext():  # output projections start smaller
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": run.num_layers}))
    warm_up = {"total_num_steps": num_steps, "warmup_num_steps": max(2, num_steps // 20), "warmup_min_ratio": 0.0}
    plain: PlainEngine | None = None
    if contestant == DDP:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=False)
        plain = PlainEngine(model, in_ddp(model, bucket=bucket), optimizer, stage=0)
    elif contestant.host == "DiLoCo":
        plain = DiLoCoEngine(model, rate=options.rate, every=contestant.every)
    if plain is not None:
        plain.scheduler = WarmupCosineLR(plain.optimizer, **warm_up)
        return plain
    config = contestant.config("fp32", bucket=bucket, overlap=contestant.stage == 2)
    config |= {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": options.rate, "torch_adam": True, "fused": False}},
        "scheduler": {"type": "WarmupCosineLR", "params": warm_up},
    }
    if contestant.coverage < 1:
        config[KEY]["coverage"] = [{"coverage": contestant.coverage, "whole_ends": 1}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


@torch.no_grad()
def dense_loss(engine: Any, rows: torch.Tensor) -> float:
    """Mean over the rows of all ranks. Every rank calls it, with as many rows."""
    engine.eval()
    losses = [float(engine(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in rows.split(4)]
    engine.train()
    total = torch.tensor([sum(losses), float(len(rows))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
