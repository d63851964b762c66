"""How long does a step take, beside plain DeepSpeed's with ZeRO? Median step times, alternating within one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --output benchmarks/results/step_time_2.json
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --all-modes --model wide --bucket 2e6 --output ...
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --all-modes --stage 1 2 --output ...
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --stage 2 --overlap --bucket 5e5 --output ...
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --optimizer Muon --stage 1 2 --output ...
    RANKS=4 benchmarks/namespaces.sh benchmarks/step_time.py --stage 2 1 --subnetworks 4 --bucket 2e6 ...

`--ddp` adds PyTorch's DDP without DeepSpeed, which sends the bytes of C = 1 and overlaps them always.

With several stages each has its plain DeepSpeed; the last one's is the baseline of all. `--overlap` lets everybody run
twice, without and with `overlap_comm`; benchmarks/namespaces.sh runs that over a slow link.

Each repeat times one step of every contestant, in an order that rotates, so that drift of the machine falls on all
alike. A repeat's time is the slowest rank's. Ratios are taken per repeat against the baseline of the same repeat. One
more step of each, not timed, is counted: FLOPs and bytes sent, on every rank; between namespaces one more, of which the
link's own counter says what crossed it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import Batch, Contestant, build_engine, spectral_gap, train
from benchmarks.common.device import device, seconds
from benchmarks.common.flops import count_work
from benchmarks.common.links import LinkWatch, use
from benchmarks.common.models import SEQUENCE_LENGTH, SMALL, WIDE, num_parameters
from benchmarks.common.ranks import gather, option_parser, run
from benchmarks.common.refusing import refusing
from benchmarks.systems.plain import build_ddp
from sdp_deepspeed.config import MODES, Mode

MODELS = {"small": SMALL, "wide": WIDE}
# Of the step time of plain DeepSpeed at the same stage with AdamW, at C = 1 and at C = 1/2.
TARGETS: dict[int, dict[Mode, tuple[float, float | None]]] = {
    1: {
        Mode("forward", "block"): (1.0, None),
        Mode("forward", "neuron"): (1.0, 0.6),
        Mode("backward", "block"): (1.0, 0.85),
        Mode("backward", "neuron"): (1.0, 1.0),
    },
    2: {mode: (0.9, 0.5 if mode.regime == "forward" else None) for mode in MODES},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},  # the contestants' own
    "Muon": {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-4, "torch_adam": True}}},
}
OVERLAP = ", overlap"  # ends the names of those that run with overlap_comm
DDP = "DDP"


def named_runs(arguments: argparse.Namespace) -> dict[str, tuple[Contestant, bool]]:
    """By name who runs, and whether with `overlap_comm`; for each stage plain DeepSpeed first."""
    found = {}
    for stage, overlap in itertools.product(arguments.stage, (False, True) if arguments.overlap else (False,)):
        for contestant in contestants(stage, MODES if arguments.all_modes else MODES[:1], arguments):
            found[name_of(contestant, several_stages=len(arguments.stage) > 1) + OVERLAP * overlap] = (
                contestant,
                overlap,
            )
    return found


def contestants(stage: int, modes: tuple[Mode, ...], arguments: argparse.Namespace) -> Iterator[Contestant]:
    yield Contestant(stage)
    size, subnetworks = dist.get_world_size(), arguments.subnetworks
    for mode, holders in itertools.product(modes, sorted({size, max(1, size // 2)}, reverse=True)):
        yield Contestant(stage, mode, holders / size)
    if subnetworks is not None:
        for mode in modes:
            yield Contestant(stage, mode, max(1, subnetworks // 2) / subnetworks, subnetworks)


def name_of(contestant: Contestant, *, several_stages: bool) -> str:
    if contestant.mode is None:
        return f"zero{contestant.stage}"
    stage = f" + ZeRO-{contestant.stage}" if several_stages else ""
    replicas = f", {contestant.subnetworks} subnetworks" if contestant.subnetworks else ""
    return f"{contestant.mode}{stage} C={contestant.coverage:g}{replicas}"


def target(contestant: Contestant, baseline_stage: int) -> float | None:
    """What the step may take of the baseline's time; None where nothing was promised."""
    if contestant.mode is None or contestant.stage != baseline_stage:
        return None
    whole, half = TARGETS.get(contestant.stage, {}).get(contestant.mode, (None, None))
    return whole if contestant.coverage == 1 else half


def config_of(contestant: Contestant, overlap: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    return contestant.config("fp32", bucket=int(arguments.bucket), overlap=overlap) | {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": 1.0,
        **OPTIMIZERS[arguments.optimizer],
    }


def build_plain(arguments: argparse.Namespace) -> Any:
    """DDP, with the optimizer of all.

    Raises:
        ValueError: it is asked for more than one micro-step, or another optimizer.
    """
    if arguments.accumulation > 1 or arguments.optimizer != "AdamW":
        raise ValueError("--ddp makes one micro-step with AdamW: leave out --accumulation and --optimizer, or --ddp")
    return build_ddp(MODELS[arguments.model], "fp32", bucket=int(arguments.bucket), fused=False)


def slowest(engine: Any, batch: Batch) -> float:
    """Seconds of one step from a barrier to the step's end on the slowest rank."""
    dist.barrier()
    start = seconds()
    train(engine, batch)
    value = torch.tensor([seconds() - start], dtype=torch.float64, device=engine.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def time_steps(engines: dict[str, Any], batch: torch.Tensor, *, warmup: int, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for repeat in range(warmup + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            taken = slowest(engines[name], batch)
            if repeat >= warmup:
                times[name].append(taken)
    return times


def link_use(engine: Any, batch: Batch) -> dict[str, float]:
    """What one step sends over the link that this rank's node has, headers and all; the same for all of its ranks.
    Beside these "bytes" the seconds of the step in which the link carried both directions, one, or none of them."""
    dist.barrier()
    with LinkWatch(Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")) as watch:
        dist.barrier()
        train(engine, batch)
        dist.barrier()
    return use(watch.looks) | {"bytes": watch.looks[-1][1] - watch.looks[0][1]}


def is_linked() -> bool:
    """Whether this runs between namespaces."""
    return "SDP_LINK_RATE" in os.environ


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times, and per rank what one step does."""
    model, stage = MODELS[arguments.model], arguments.stage[-1]
    runs = named_runs(arguments)
    configs = {name: config_of(*contestant, arguments) for name, contestant in runs.items()}
    engines = {name: build_engine(model, config) for name, config in configs.items()}
    if arguments.ddp:
        with refusing():
            engines[DDP] = build_plain(arguments)
    if arguments.all_to_all_of_gloo:
        for name, (contestant, _) in runs.items():
            if contestant.mode is not None:
                engines[name].dp_group._dist = dist
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(0, model["vocab_size"], (arguments.micro_batch, SEQUENCE_LENGTH), generator=generator).to(
        device()
    )
    times = time_steps(engines, batch, warmup=arguments.warmup, repeats=arguments.repeats)
    work = {name: gather(count_work(partial(train, engine, batch))) for name, engine in engines.items()}
    links = {name: gather(link_use(engine, batch)) for name, engine in engines.items()} if is_linked() else None
    return {
        "what": "step_time",
        "ranks": dist.get_world_size(),
        "baseline": f"zero{stage}",
        "model": model | {"num_parameters": num_parameters(model)},
        "sequence_length": SEQUENCE_LENGTH,
        "link": os.environ.get("SDP_LINK_RATE"),
        "link_setting": os.environ.get("SDP_LINK_SETTING"),
        "ranks_per_node": int(os.environ["LOCAL_SIZE"]) if is_linked() else None,
        "arguments": vars(arguments),
        "configs": configs,
        "spectral_gaps": {name: spectral_gap(model, engine) for name, engine in engines.items()},
        "targets": {
            name: target(contestant, stage) if arguments.optimizer == "AdamW" else None
            for name, (contestant, _) in runs.items()
        }
        | dict.fromkeys([DDP] * arguments.ddp),
        "seconds": times,
        "work": work,
        "link_bytes": links and {name: [rank.pop("bytes") for rank in ranks] for name, ranks in links.items()},
        "link_use": links,
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--all-modes", action="store_true", help="every regime and strategy, not only forward x block")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--bucket", type=float, default=5e8, help="reduce_bucket_size of all contestants (elements)")
    parser.add_argument("--stage", type=int, nargs="+", default=[1], choices=(0, 1, 2))
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="AdamW")
    parser.add_argument("--subnetworks", type=int, help="one more of each mode, with fewer subnetworks than ranks")
    parser.add_argument("--overlap", action="store_true", help="everybody without and with overlap_comm")
    parser.add_argument("--ddp", action="store_true", help="PyTorch's DDP too")
    parser.add_argument("--all-to-all-of-gloo", action="store_true", help="send one way after the other, to compare")
    run(parser, measure)


if __name__ == "__main__":
    main()
