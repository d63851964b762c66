"""One group of subjects, measured side by side on all ranks: what each holds and sends, then times that alternate."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.contestants import Batch, bytes_of, inputs_of, train
from benchmarks.common.device import device
from benchmarks.common.measured_step import measured_step
from benchmarks.common.models import Shape, num_parameters
from benchmarks.common.ranks import gather, show
from benchmarks.common.traffic_counter import TrafficCounter
from benchmarks.peak_memory import live_tensors
from benchmarks.step_time import is_linked, link_use, slowest
from benchmarks.systems.bounds import everything_whole, of_plan, of_sharded_plan, weights_sharded
from benchmarks.systems.split import split_step
from benchmarks.systems.subjects import Subject

SAME_LOSS = 1e-5  # of two that train the same in fp32, in each of their first steps
_KEPT = ("weights", "gradients", "optimizer", "peak", "peak_backward", "peak_step", "activations", "flops", "sent")


@dataclass(frozen=True)
class Setting:
    """What is the same for all subjects.

    Args:
        bucket: elements.
        batch: of this rank, on its device.
        warmup, repeats, splits: steps of each subject that are not kept; timed; and split into their parts.
    """

    shape: Shape
    precision: str
    bucket: int
    batch: Batch
    warmup: int
    repeats: int
    splits: int

    @property
    def micro_batch(self) -> int:
        """Sequences or images of this rank."""
        return len(inputs_of(self.batch)["labels"])


def measure(subjects: Sequence[Subject], setting: Setting) -> dict[str, Any]:
    """By subject's name: seconds of the slowest rank, and per rank what it held and sent, CPU seconds and parts, and
    between namespaces how a step used the link.

    Raises:
        RuntimeError: two did not train what they should have, on all ranks.
    """
    found: dict[str, Any] = {}
    with engines_of(subjects, setting, found) as engines:
        if setting.precision == "fp32":
            check_same_losses(subjects, found)
        times = alternating(engines, setting)
        for name, engine in engines.items() if is_linked() else ():
            times[name]["link_use"] = gather(link_use(engine, setting.batch))
    return {name: {**times[name], "ranks": found[name]} for name in found}


def check_same_losses(subjects: Sequence[Subject], figures: Mapping[str, Any]) -> None:
    """A figure of something else than it says is worth nothing. In bf16 the losses of ZeRO's own stages differ.

    Args:
        figures: per subject's name those of each rank, with its losses.

    Raises:
        RuntimeError: two train the same, and a loss differs by more than SAME_LOSS.
    """
    first: dict[str, str] = {}
    for subject in subjects:
        name = first.setdefault(subject.trains, subject.name)
        pairs = zip(figures[name], figures[subject.name], strict=True)
        differences = [abs(a - b) for one, two in pairs for a, b in zip(one["losses"], two["losses"], strict=True)]
        apart = [difference for difference in differences if not difference <= SAME_LOSS]  # also what is no number
        if apart:
            raise RuntimeError(f"{subject.name} does not train what {name} does: their losses differ by {apart[0]:.1e}")


@contextmanager
def engines_of(subjects: Sequence[Subject], setting: Setting, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Engines by name, each counted alone before the next is built; nothing of them is left afterward.

    Args:
        figures: gets per rank what each holds and sends.
    """
    engines: dict[str, Any] = {}
    try:
        for subject in subjects:
            gc.collect()
            gc.freeze()  # what is there now is no tensor of the next one
            engine = subject.build(
                setting.shape, setting.precision, micro_batch=setting.micro_batch, bucket=setting.bucket
            )
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
    """What this rank holds and sends in its third step, and its losses so far; no collective but the steps'."""
    losses = [train(engine, setting.batch) for _ in range(2)]  # with the second one all that is made once is there
    with measured_step(engine, others=live_tensors()) as figures:
        losses.append(train(engine, setting.batch))
    with TrafficCounter() as traffic:
        losses.append(train(engine, setting.batch))
    kept = {name: value for name, value in asdict(figures).items() if name in _KEPT}
    calls = dict(traffic.calls_by_operator)
    return kept | {
        "sent_by_operator": figures.sent_by_operator,
        "calls": calls,
        "losses": list(map(float, losses)),
        "bound": bound(subject, engine, setting),
    }


def bound(subject: Subject, engine: Any, setting: Setting) -> float:
    """The fewest bytes that this rank can send in a step."""
    num_ranks, rank, sizes = dist.get_world_size(), dist.get_rank(), bytes_of(setting.precision)
    shapes = subject.dense_shapes(setting.shape)
    whole = sum(map(prod, shapes.values()))
    wire, weights = sizes.wire, sizes.weights
    if subject.contestant is None and subject.kind != "FSDP2":  # DDP's gradients are fp32's, also under autocast
        return everything_whole(whole, num_ranks, wire=4, weights=4)
    if subject.contestant is None or (subject.contestant.stage == 3 and subject.contestant.mode is None):
        once = num_parameters(setting.shape | {"num_hidden_layers": 1})
        return weights_sharded(whole - once, once, num_ranks, wire=wire, weights=weights)
    if subject.contestant.mode is None:
        return everything_whole(whole, num_ranks, wire=wire, weights=weights)
    if subject.kind == "FSDP2":
        last = f"model.layers.{setting.shape['num_hidden_layers'] - 1}."
        return of_sharded_plan(engine.plan, shapes, rank, last=last, wire=wire, weights=weights)
    return of_plan(engine.plan, shapes, rank, wire=wire, weights=weights)


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
