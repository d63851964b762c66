"""Median step time of subnetwork data parallelism against DeepSpeed ZeRO-1, alternating within one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/step_time.py --output benchmarks/results/step_time_2.json

Each repeat times one step of every contestant, in an order that rotates, so that drift of the machine falls on all
alike. A repeat's time is the slowest rank's. Ratios are taken per repeat against the baseline of the same repeat.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from provenance import write_result
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
SEQUENCE_LENGTH = 128


def contestants(size: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """DeepSpeed configs by name; the first is the baseline."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.stage, "reduce_bucket_size": int(arguments.bucket)},
        "gradient_clipping": 1.0,
    }
    result = {f"zero{arguments.stage}": base}
    for holders in sorted({size, max(1, size // 2)}, reverse=True):
        result[f"sdp C={holders / size:g}"] = base | {"subnetwork_data_parallel": {"holders": holders}}
    return result


def build(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def one_step(engine: Any, batch: torch.Tensor) -> float:
    """Seconds of one optimizer step with all its micro-steps, barrier to barrier on this rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    return time.perf_counter() - start


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    configs = contestants(size, arguments)
    engines = {name: build(config) for name, config in configs.items()}
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(0, MODEL["vocab_size"], (arguments.micro_batch, SEQUENCE_LENGTH), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for repeat in range(arguments.warmup + arguments.repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        for name in order:
            seconds = slowest(one_step(engines[name], batch))
            if repeat >= arguments.warmup:
                times[name].append(seconds)
    parameters = sum(p.numel() for p in engines[names[0]].module.parameters())
    return {
        "what": "step_time",
        "ranks": size,
        "baseline": names[0],
        "model": MODEL | {"num_parameters": parameters},
        "sequence_length": SEQUENCE_LENGTH,
        "arguments": vars(arguments),
        "configs": configs,
        "seconds": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--bucket", type=float, default=5e8, help="reduce_bucket_size of all contestants (elements)")
    parser.add_argument("--stage", type=int, default=1, choices=(0, 1))
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
