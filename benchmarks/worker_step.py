"""What does a step of one worker ask of its device? `on_gpu.py steps` runs it: 1B and 7B, without peers.

One rank of a world that is not there (`host_time.py`) trains in bf16 at stage 1 with AdamW. All kernels run but those
of collectives, so that received values mean nothing and times do not depend on them. Forward with backward, and the
step, are measured apart: kernels and the time in which any of them ran (torch's profiler), idle time beside it, seconds
of the thread that launched them, and the peak of memory beside what `sdp estimate` says. On the CPU a small model shows
operators instead of kernels, without idle time and peak (which `peak_memory.py` has).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.device import device, device_events, seconds
from benchmarks.host_time import CASES, MODELS, RANK, Case, Worker, build_worker
from sdp_deepspeed.estimate.per_rank import Precision, Setup, estimate

SMALL = Case("small", "block", 8, 8, 0)
_SMALL_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}


def measure(*, sequence: int, repeats: int) -> list[dict[str, Any]]:
    """All cases on a GPU, a small one on the CPU.

    Args:
        sequence: tokens of a step.
    """
    if device().type == "cpu":
        return [measure_case(SMALL, _SMALL_SHAPE, sequence=16, repeats=1)]
    results = []
    for case in CASES:
        results.append(measure_case(case, MODELS[case.model], sequence=sequence, repeats=repeats))
        gc.collect()  # the worker's tensors are in circles
        torch.cuda.empty_cache()
    return results


def measure_case(case: Case, shape: dict[str, Any], *, sequence: int, repeats: int) -> dict[str, Any]:
    worker = build_worker(case, shape, str(device()), adamw, needs_norm=True)
    tokens = torch.randint(0, shape["vocab_size"], (1, sequence), device=device())
    phases: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: worker.model(input_ids=tokens, labels=tokens).loss.backward(),
        "step": worker.optimizer.step,
    }
    for _ in range(2):  # with the second one all that is made once is there
        for phase in phases.values():
            phase()
    times: dict[str, list[dict[str, float]]] = {name: [] for name in phases}
    peaks = {}
    for _ in range(repeats):
        for name, phase in phases.items():
            reset_peak()
            times[name].append(timed(phase))
            peaks[name] = peak()
    kernels = {name: profiled(phase) for name, phase in phases.items()}
    result = vars(case) | {"shape": shape, "sequence": sequence, "estimate": estimated(worker), "phases": {}}
    for name in phases:
        wall = median(time["wall_seconds"] for time in times[name])
        idle = None if kernels[name]["busy_seconds"] is None else max(0.0, wall - kernels[name]["busy_seconds"])
        result["phases"][name] = kernels[name] | {"peak": peaks[name], "times": times[name], "idle_seconds": idle}
    return result


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def timed(phase: Callable[[], object]) -> dict[str, float]:
    """Seconds until the device was done, and seconds in which the launching thread was busy."""
    start, busy = seconds(), time.thread_time()
    phase()
    busy = time.thread_time() - busy
    return {"wall_seconds": seconds() - start, "host_seconds": busy}


def profiled(phase: Callable[[], object]) -> dict[str, Any]:
    """Kernels, copies and fills by name, and seconds in which one ran; on the CPU operators, nested ones too."""
    on_gpu = device().type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        phase()
        seconds()
    operators = (event for event in profiler.events() or () if event.name.startswith("aten::"))
    kernels = device_events(profiler) if on_gpu else list(operators)
    spans = ((event.time_range.start, event.time_range.end) for event in kernels)
    return {
        "num_kernels": len(kernels),
        "kernels": dict(Counter(event.name for event in kernels).most_common()),
        "busy_seconds": covered(spans) / 1e6 if on_gpu else None,
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def estimated(worker: Worker) -> dict[str, int]:
    """Bytes of this rank, as `sdp estimate` has them, and of the largest bucket as it is sent."""
    model = worker.rank_model
    setup = Setup(stage=1, precision=Precision.of("bf16"))
    figures = estimate(model.plan, model.tensors, setup)[RANK]
    buckets = worker.optimizer.exchange.buckets
    bucket = max(sum(segment.num_elements for segment in bucket.segments) for bucket in buckets)
    return vars(figures) | {"state": figures.state, "bucket": bucket * setup.precision.wire}


def reset_peak() -> None:
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak() -> int | None:
    """Bytes of tensors, since `reset_peak`; None where torch does not know."""
    return torch.cuda.max_memory_allocated() if device().type == "cuda" else None
