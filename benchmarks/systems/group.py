"""One group of subjects, measured side by side on all ranks: what each holds and sends, then times that alternate."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.contestants import bytes_of, train
from benchmarks.common.device import device
from benchmarks.common.models import Shape, num_parameters
from benchmarks.common.ranks import gather, show
from benchmarks.peak_memory import live_tensors
from benchmarks.step_time import slowest
from benchmarks.systems.bounds import everything_whole, of_plan, weights_sharded
from benchmarks.systems.split import split_step
from benchmarks.systems.subjects import Subject
from sdp_deepspeed.measure.step import measured_step
from sdp_deepspeed.measure.traffic import TrafficCounter

_KEPT = ("weights", "gradients", "optimizer", "peak", "peak_backward", "peak_step", "activations", "flops", "sent")


@dataclass(frozen=True)
class Setting:
    """What is the same for all subjects.

    Args:
        bucket: elements.
        batch: tokens of this rank, on its device.
        warmup, repeats, splits: steps of each subject that are not kept; timed; and split into their parts.
    """

    shape: Shape
    precision: str
    bucket: int
    batch: torch.Tensor
    warmup: int
    repeats: int
    splits: int


def measure(subjects: Sequence[Subject], setting: Setting) -> dict[str, Any]:
    """By subject's name: seconds of the slowest rank, and per rank what it held and sent, CPU seconds and parts."""
    found: dict[str, Any] = {}
    with engines_of(subjects, setting, found) as engines:
        times = alternating(engines, setting)
    return {name: {**times[name], "ranks": found[name]} for name in found}


@contextmanager
def engines_of(subjects: Sequence[Subject], setting: Setting, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Engines by name, each counted alone before the next is built; nothing of them is left afterward.

    Args:
        figures: gets per rank what each holds and sends.
    """
    engines: dict[str, Any] = {}
    micro_batch = len(setting.batch)
    try:
        for subject in subjects:
            gc.collect()
            gc.freeze()  # what is there now is no tensor of the next one
            engine = subject.build(setting.shape, setting.precision, micro_batch=micro_batch, bucket=setting.bucket)
            engines[subject.name] = engine
            figures[subject.name] = gather(counted(subject, engine, setting))
            show(f"  {subject.name}")
        yield engines
    finally:
        gc.unfreeze()
        for engine in engines.values():
            engine.destroy()
        engines.clear()
        gc.collect()


def counted(subject: Subject, engine: Any, setting: Setting) -> dict[str, Any]:
    """What this rank holds and sends in its third step; no collective but the steps'."""
    for _ in range(2):  # with the second one all that is made once is there
        train(engine, setting.batch)
    with measured_step(engine, others=live_tensors()) as figures:
        train(engine, setting.batch)
    with TrafficCounter() as traffic:
        train(engine, setting.batch)
    kept = {name: value for name, value in asdict(figures).items() if name in _KEPT}
    calls = dict(traffic.calls_by_operator)
    return kept | {
        "sent_by_operator": figures.sent_by_operator,
        "calls": calls,
        "bound": bound(subject, engine, setting),
    }


def bound(subject: Subject, engine: Any, setting: Setting) -> float:
    """The fewest bytes that this rank can send in a step."""
    num_ranks, rank, sizes = dist.get_world_size(), dist.get_rank(), bytes_of(setting.precision)
    whole = num_parameters(setting.shape)
    wire, weights = sizes.wire, sizes.weights
    if subject.contestant is None and subject.kind != "FSDP2":  # DDP's gradients are fp32's, also under autocast
        return everything_whole(whole, num_ranks, wire=4, weights=4)
    if subject.contestant is None or subject.contestant.stage == 3:
        once = num_parameters(setting.shape | {"num_hidden_layers": 1})
        return weights_sharded(whole - once, once, num_ranks, wire=wire, weights=weights)
    if subject.contestant.mode is None:
        return everything_whole(whole, num_ranks, wire=wire, weights=weights)
    return of_plan(engine.plan, dense_shapes(setting.shape), rank, wire=wire, weights=weights)


def dense_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Of all parameters of the dense model."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def alternating(engines: dict[str, Any], setting: Setting) -> dict[str, dict[str, Any]]:
    """Each repeat takes one step of every engine, in an order that rotates; a collective."""
    names = list(engines)
    times: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": [], "splits": []} for name in names}
    for repeat in range(setting.warmup + setting.repeats + setting.splits):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            if repeat >= setting.warmup + setting.repeats:
                times[name]["splits"].append(gather(split_step(engines[name], setting.batch)))
                continue
            start = time.process_time()
            taken = slowest(engines[name], setting.batch)
            spent = gather(time.process_time() - start)
            if repeat >= setting.warmup:
                times[name]["seconds"].append(taken)
                times[name]["cpu_seconds"].append(spent)
    return times


def tokens(shape: Shape, micro_batch: int, length: int) -> torch.Tensor:
    """Each rank its own, the same in every run [sequences, length]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, shape["vocab_size"], (micro_batch, length), generator=generator).to(device())
