"""Median step time of subnetwork data parallelism against DeepSpeed ZeRO, alternating within one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --output benchmarks/results/step_time_2.json
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --corners --model wide --bucket 2e6 --output ...
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --corners --stage 1 2 --accumulation 4 --output ...
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --stage 2 --overlap --bucket 5e5 --output ...

With several stages each has its plain DeepSpeed; the last one's is the baseline of all. `--overlap` lets everybody run
twice, without and with `overlap_comm`; benchmarks/namespaces.sh runs that over a slow link.

Each repeat times one step of every contestant, in an order that rotates, so that drift of the machine falls on all
alike. A repeat's time is the slowest rank's. Ratios are taken per repeat against the baseline of the same repeat. One
more step of each, not timed, is counted: FLOPs and bytes sent, on every rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.flops import count_work
from common.provenance import write_result
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # noqa: F401  (arms the seam)

# About 6.5M parameters: 6.3M in 8 layers, the rest embeddings (tied), as in DESIGN.md's figures.
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# 13.2M parameters in fewer, wider layers, where matrix products weigh more against everything else.
WIDE = MODEL | {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
MODELS = {"small": MODEL, "wide": WIDE}
SEQUENCE_LENGTH = 128

CORNERS = list(itertools.product(("forward", "backward"), ("block", "neuron")))
# Of the step time of plain DeepSpeed at the same stage, at C = 1 and at C = 1/2.
TARGETS: dict[int, dict[tuple[str, str], tuple[float, float | None]]] = {
    1: {
        ("forward", "block"): (1.0, None),
        ("forward", "neuron"): (1.0, 0.6),
        ("backward", "block"): (1.0, 0.85),
        ("backward", "neuron"): (1.0, 1.0),
    },
    2: {corner: (0.9, 0.5 if corner[0] == "forward" else None) for corner in CORNERS},
}
OVERLAP = ", overlap"  # ends the names of those that run with overlap_comm


def contestants(size: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """DeepSpeed configs by name."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }
    bucket = int(arguments.bucket)
    result = {}
    for stage, overlap in itertools.product(arguments.stage, (False, True) if arguments.overlap else (False,)):
        zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": overlap}
        plain = base | {"zero_optimization": zero}
        ending = OVERLAP * overlap
        result[f"zero{stage}{ending}"] = plain
        for regime, strategy in CORNERS if arguments.corners else CORNERS[:1]:
            for holders in coverages(size):
                name = f"{regime} x {strategy}" if arguments.corners else "sdp"
                name += f" + ZeRO-{stage}" * (len(arguments.stage) > 1) + f" C={holders / size:g}"
                block = {"holders": holders, "regime": regime, "strategy": strategy}
                result[name + ending] = plain | {"subnetwork_data_parallel": block}
    return result


def coverages(size: int) -> list[int]:
    """Holders of C = 1 and of C = 1/2."""
    return sorted({size, max(1, size // 2)}, reverse=True)


def target(config: dict[str, Any], size: int, baseline_stage: int) -> float | None:
    """What the step may take of the baseline's time; None where nothing was promised."""
    block, stage = config.get("subnetwork_data_parallel"), config["zero_optimization"]["stage"]
    if block is None or stage != baseline_stage:
        return None
    whole, half = TARGETS.get(stage, {}).get((block["regime"], block["strategy"]), (None, None))
    return whole if block["holders"] == size else half


def build(config: dict[str, Any], model_config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**model_config))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def run_step(engine: Any, batch: torch.Tensor) -> None:
    """One optimizer step with all its micro-steps."""
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()


def slowest(engine: Any, batch: torch.Tensor) -> float:
    """Seconds of one step from a barrier to the step's end on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run_step(engine, batch)
    value = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def time_steps(engines: dict[str, Any], batch: torch.Tensor, *, warmup: int, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for repeat in range(warmup + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds = slowest(engines[name], batch)
            if repeat >= warmup:
                times[name].append(seconds)
    return times


def work_of_ranks(engine: Any, batch: torch.Tensor) -> list[dict[str, int]]:
    """Per rank what one step does; a collective."""
    work: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(work, count_work(lambda: run_step(engine, batch)))
    return work


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    configs = contestants(size, arguments)
    model_config = MODELS[arguments.model]
    engines = {name: build(config, model_config) for name, config in configs.items()}
    stage = arguments.stage[-1]
    baseline = f"zero{stage}"
    num_parameters = sum(p.numel() for p in engines[baseline].module.parameters())
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(0, model_config["vocab_size"], (arguments.micro_batch, SEQUENCE_LENGTH), generator=generator)
    times = time_steps(engines, batch, warmup=arguments.warmup, repeats=arguments.repeats)
    return {
        "what": "step_time",
        "ranks": size,
        "baseline": baseline,
        "model": model_config | {"num_parameters": num_parameters},
        "sequence_length": SEQUENCE_LENGTH,
        "link": os.environ.get("SDP_LINK_RATE"),
        "arguments": vars(arguments),
        "configs": configs,
        "targets": {name: target(config, size, stage) for name, config in configs.items()},
        "seconds": times,
        "work": {name: work_of_ranks(engine, batch) for name, engine in engines.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--corners", action="store_true", help="all regimes and strategies, not only forward x block")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--bucket", type=float, default=5e8, help="reduce_bucket_size of all contestants (elements)")
    parser.add_argument("--stage", type=int, nargs="+", default=[1], choices=(0, 1, 2))
    parser.add_argument("--overlap", action="store_true", help="everybody without and with overlap_comm")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.init_distributed("gloo")
    result = measure(arguments)
    if dist.get_rank() == 0:
        write_result(arguments.output, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
