"""How long until a dense loss is reached over a slow link? SDP and its teams beside ZeRO and torchft's DiLoCo, by the
clock. links.sh runs it.

Llamas over bytes of the standard library's Python files. Everybody reads the same text in the same order, at stage 1 or
2, and overlaps communication where it can. SDP at C = 1/2 makes a third more steps than ZeRO, a model of half the depth
(with about as many operations), teams and DiLoCo twice as many. Each node is a team. Teams and DiLoCo average weights
every H steps, and are evaluated after that. At C = 1/2 all subnetworks have the first and the last layer.

In the runs of `FAULTS` the last team is killed after a third of the steps. It stays away, or starts again later, with
new moments of its optimizer.

The clock stops while the dense model is evaluated, on text that is not trained on. Memory is measured afterwards, in a
step that ends with a synchronization. Runs come one after the other, each is written when it is done, and the same
command goes on after the last one. DiLoCo and teams need `pip install -e ".[benchmarks]"`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
import sdp_deepspeed
from benchmarks.common.contestants import BLOCK, CLIPPING, Contestant, train
from benchmarks.common.device import seconds
from benchmarks.common.diloco import DiLoCoEngine
from benchmarks.common.measured_step import live_tensors, measured_step
from benchmarks.common.models import SMALL, num_parameters
from benchmarks.common.provenance import provenance, write_result
from benchmarks.common.ranks import found_before, gather, num_nodes, option_parser, run, show
from benchmarks.common.team_processes import run_in_teams
from benchmarks.learning.text import VOCABULARY, read_corpus, training_rows, validation_rows
from sdp_deepspeed.config import KEY

LENGTH = 128
WIDTH = 96
SHAPE = SMALL | {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "initializer_range": math.sqrt(2 / (5 * WIDTH)),  # as in benchmarks/learning, for narrow models
}
SEED = 0
RATE = 3e-3  # the highest learning rate
BUCKET = 200_000  # elements, of all who have buckets
VALIDATION_ROWS = 64
BACK_AFTER = 10.0  # seconds until a killed team starts again


@dataclass(frozen=True)
class Run:
    """Who trains.

    Args:
        steps: as a share of plain ZeRO's.
        num_layers: of the model.
        loses: whether the last team is killed after a third of the steps.
        returns: whether it starts again.
    """

    contestant: Contestant
    steps: Fraction = Fraction(1)
    num_layers: int = SHAPE["num_hidden_layers"]
    loses: bool = False
    returns: bool = False


def _teams(coverage: Fraction, every: int) -> dict[str, Run]:
    contestant = Contestant(1, BLOCK, float(coverage), host="teams", every=every)
    return {f"SDP teams + ZeRO-1, C = {coverage}, H = {every}": Run(contestant, Fraction(2))}


def _runs() -> dict[str, Run]:
    runs = {
        "ZeRO-1": Run(Contestant(1)),
        "ZeRO-2, half the depth": Run(Contestant(2), Fraction(2), SHAPE["num_hidden_layers"] // 2),
        "SDP + ZeRO-2, C = 1/2": Run(Contestant(2, BLOCK, 0.5), Fraction(4, 3)),
    }
    for every in (5, 10, 30):
        runs[f"torchft's DiLoCo + FSDP2, H = {every}"] = Run(Contestant(3, host="DiLoCo", every=every), Fraction(2))
        runs |= _teams(Fraction(1), every) | _teams(Fraction(1, 2), every)
    return runs


def _faults() -> dict[str, Run]:
    runs = {}
    for coverage in (Fraction(1), Fraction(1, 2)):
        for name, undisturbed in _teams(coverage, 10).items():
            runs[name] = undisturbed
            runs[f"{name}; one lost"] = replace(undisturbed, loses=True)
            runs[f"{name}; one lost, back"] = replace(undisturbed, loses=True, returns=True)
    return runs


RUNS = _runs()
FAULTS = _faults()
SETS = {"runs": RUNS, "faults": FAULTS}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of plain ZeRO")
    parser.add_argument("--every", type=int, default=30, help="steps between two evaluations")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a run ends, of teams none")
    parser.add_argument("--set", default="runs", choices=SETS, dest="chosen", help="of runs")
    parser.add_argument("--only", nargs="+", choices=RUNS | FAULTS, help="(default: all of the set)")
    run(parser, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs that are not in the output yet. Every rank calls it."""
    facts: dict[str, Any] = {
        "what": "time_to_loss",
        "ranks": dist.get_world_size(),
        "link": os.environ.get("SDP_LINK_RATE"),
        "nodes": num_nodes(),
        "model": SHAPE | {"num_parameters": num_parameters(SHAPE)},
        "steps": options.steps,
        "every": options.every,
    }
    results = found_before(options.output, facts).get("results", [])
    done = {row["name"] for row in results}
    for name in options.only or SETS[options.chosen]:
        if name not in done:
            results.append(measure_run(name, options))
            if dist.get_rank() == 0:
                write_result(options.output, facts | {"results": results})
    return facts | {"results": results}


def measure_run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The curve of a run, what it sent over the links, and its memory. Every rank calls it.

    Returns:
        "curve": steps, seconds of training and loss of the dense model, at each evaluation. "steps": of the whole run,
        which may have ended by its time limit. By rank: "link_bytes" that its node sent, 0 without links;
        "seconds_synchronizing"; "longest_step" in seconds, synchronization included; "peak", bytes in a step that ends
        with a synchronization.
    """
    of_name, load = (RUNS | FAULTS)[name], os.getloadavg()[0]
    arguments = (of_name, options, dist.get_rank(), dist.get_world_size())
    if of_name.contestant.host == "teams":
        ranks = run_in_teams(measure_rank, *arguments, back_after=BACK_AFTER if of_name.returns else None)
    else:
        ranks = gather(measure_rank(*arguments))
    result: dict[str, Any] = {"name": name, "load": load, "provenance": provenance()}
    result |= {"steps": ranks[0]["steps"], "curve": ranks[0]["curve"]}
    ranks = [of_rank for of_rank in ranks if of_rank is not None]
    for what in ("link_bytes", "seconds_synchronizing", "longest_step", "peak"):
        result[what] = [of_rank[what] for of_rank in ranks]
    show(f"{name} (load {load:.1f}): {result['curve'][-1]}, peak {max(result['peak']) / 2**20:.1f} MiB")
    return result


def measure_rank(run: Run, options: argparse.Namespace, rank: int, num_ranks: int) -> dict[str, Any]:
    """One rank's part in `measure_run`, in the world of all ranks or of its team.

    Args:
        rank, num_ranks: of all that train.
    """
    every = run.contestant.every
    num_steps = math.ceil(options.steps * run.steps / every) * every
    data = _Data(rank, num_ranks)
    gc.collect()
    gc.freeze()  # what is there now is no tensor of the engine
    engine = build(run, num_steps, num_teams=num_ranks // dist.get_world_size())
    team, is_lost = getattr(engine, "team", None), False
    if team is not None:
        team.start()
        is_back = team.num_steps > 0
        is_lost = run.loses and not is_back and team.number == team.plan.num_subnetworks - 1
    points: list[list[float]] = []
    sent, synchronizing, longest = 0, 0.0, 0.0
    # A team that comes back at a meeting cannot know whether the others evaluate before their next step.
    late = 0 if team is None else 1
    ends = [*range(0, num_steps, math.lcm(options.every, every)), num_steps]
    for first, end in itertools.pairwise(ends):
        steps = range(first + late * (first > 0), min(end + late, num_steps))
        if team is not None:
            steps = range(max(steps.start, team.num_steps), steps.stop)
        if not steps:  # of the time in which this team was away
            continue
        dist.barrier()
        start, sent_before, synchronizing_before = seconds(), _sent_over_link(), _synchronizing(engine)
        for step in steps:
            if is_lost and step == num_steps // 3:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = seconds()
            train(engine, data.training(step))
            longest = max(longest, seconds() - begin)
        dist.barrier()
        taken = max(gather(seconds() - start))
        sent += _sent_over_link() - sent_before
        synchronizing += _synchronizing(engine) - synchronizing_before
        with engine.dense() if team is not None else nullcontext():
            loss = dense_loss(engine, data.validation)
        points.append([end, taken + (points[-1][1] if points else 0.0), loss])
        if team is None and points[-1][1] > options.limit:
            break
    for step in range(every - 1):
        train(engine, data.training(step))
    with measured_step(engine, others=live_tensors()) as figures:
        train(engine, data.training(every - 1))
    if team is not None:
        team.leave()
    engine.destroy()
    gc.unfreeze()
    result = {"steps": num_steps, "curve": points, "link_bytes": sent, "seconds_synchronizing": synchronizing}
    return result | {"longest_step": longest, "peak": figures.peak}


class _Data:
    """Rows of this rank, [rows, LENGTH]; one in a step.

    Args:
        rank, num_ranks: of all that train.

    Attributes:
        validation: the part of this rank in its world, of the validation text.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        text = read_corpus()
        self._text, self._rank, self._num_ranks = text.train, rank, num_ranks
        rows = validation_rows(text.validation, VALIDATION_ROWS, LENGTH)
        self.validation = rows[:, :LENGTH].chunk(dist.get_world_size())[dist.get_rank()]

    def training(self, step: int) -> torch.Tensor:
        rows = training_rows(self._text, SEED, step, self._num_ranks, LENGTH)
        return rows[:, :LENGTH].chunk(self._num_ranks)[self._rank]


def _sent_over_link() -> int:
    """Bytes that this rank's node has sent, by the link's counter; 0 without links."""
    if "SDP_LINK_RATE" not in os.environ:
        return 0
    return int(Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics", "tx_bytes").read_text())


def _synchronizing(engine: Any) -> float:
    """Seconds of synchronizations so far, waiting for other nodes included."""
    if (team := getattr(engine, "team", None)) is not None:
        return float(team.seconds_waiting + team.seconds_exchanging)
    return float(getattr(engine, "seconds_synchronizing", 0.0))


def build(run: Run, num_steps: int, num_teams: int) -> Any:
    """An engine on a fresh model, the same on all ranks. Every rank calls it."""
    contestant = run.contestant
    torch.manual_seed(SEED)
    with sdp_deepspeed.Init() if contestant.coverage < 1 else nullcontext():  # output projections start smaller
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": run.num_layers, "use_cache": False}))
    warm_up = {"total_num_steps": num_steps, "warmup_num_steps": max(2, num_steps // 20), "warmup_min_ratio": 0.0}
    if contestant.host == "DiLoCo":
        return DiLoCoEngine(model, rate=RATE, every=contestant.every, **warm_up)
    config = contestant.config("fp32", bucket=BUCKET, overlap=contestant.stage == 2)
    config |= {
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True, "fused": False}},
        "scheduler": {"type": "WarmupCosineLR", "params": warm_up},
    }
    if contestant.coverage < 1:
        config[KEY]["coverage"] = [{"coverage": contestant.coverage, "whole_ends": 1}]
    if contestant.host == "teams":
        config[KEY]["local_steps"] = {"teams": num_teams, "every": contestant.every, "wait_timeout": 120.0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


@torch.no_grad()
def dense_loss(engine: Any, rows: torch.Tensor) -> float:
    """Mean over the rows of all ranks. Every rank calls it, with as many rows."""
    engine.eval()
    losses = [float(engine(input_ids=part, labels=part).loss) * len(part) for part in rows.split(4)]
    engine.train()
    total = torch.tensor([sum(losses), float(len(rows))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
