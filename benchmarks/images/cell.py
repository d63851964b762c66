"""One cell of the image study: a subject that trains until a budget of operations is spent."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from benchmarks.common.workers import Workers, costs_of_step, plans_of_steps
from benchmarks.images.dropping import StochasticDepth, add_dropout
from benchmarks.images.pictures import NUM_CLASSES, SIZE, Augmented, Examples
from benchmarks.images.subjects import DEEP, Subject
from sdp_deepspeed.batch_norm import estimate_statistics, write_statistics
from sdp_deepspeed.small_image_resnet import (
    SmallImageResNetConfig,
    SmallImageResNetForImageClassification,
)

STATISTICS_BATCHES = 16  # of training images, to estimate the batch norm statistics of the dense model
_STATISTICS_SEED = 1_000


@dataclass(frozen=True)
class Settings:
    """What all cells have in common.

    Args:
        workers: k.
        rows: images of a worker in a step.
        warm_up: share of the steps in which the learning rate rises linearly; then it falls as a cosine.
        points: of the curve, the last after the last step.
    """

    workers: int = 4
    rows: int = 32
    widths: tuple[int, ...] = (8, 16, 32)
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warm_up: float = 0.05
    points: int = 2


@dataclass(frozen=True)
class Cell:
    """
    Args:
        subject: its name in the tables.
        images: training images.
        epochs: the budget, in epochs of data parallelism with all blocks.
        seed: of weights, data and plans.
        rate: the highest learning rate.
    """

    subject: str
    images: int
    epochs: int
    seed: int
    rate: float


@dataclass(frozen=True)
class Data:
    train: Examples
    held_out: Examples
    test: Examples


def build(subject: Subject, seed: int, settings: Settings = Settings()) -> PreTrainedModel:
    """A ResNet whose stages halve each side of the images."""
    torch.manual_seed(seed)
    sizes = list(settings.widths)
    model = SmallImageResNetForImageClassification(
        SmallImageResNetConfig(
            num_channels=1,
            embedding_size=sizes[0],
            stage_sizes=sizes,
            depths=[subject.num_blocks // len(sizes)] * len(sizes),
            downsample_in_first_stage=True,
            num_labels=NUM_CLASSES,
        )
    )
    return model.train().to(memory_format=torch.channels_last)


def block_of(subject: Subject, seed: int) -> dict[str, Any]:
    """`subnetwork_data_parallel` of a run. Draws have the seeds after the first, so those of runs are far apart."""
    return {**(subject.block or {"coverage": 1.0}), "seed": seed * 1_000_003}


class Training:
    """The parts of a run, which `run` puts together."""

    def __init__(self, subject: Subject, data: Data, seed: int, settings: Settings) -> None:
        self.subject, self.data, self.seed, self.settings = subject, data, seed, settings
        self.model = build(subject, seed, settings)
        self.batches = Augmented(data.train, settings.workers * settings.rows, seed)
        self.plans = plans_of_steps(self.model, block_of(subject, seed), settings.workers)
        config, plan = next(self.plans)
        self.workers = Workers(self.model, plan, is_scaled=config.is_scaled)
        self.depth = StochasticDepth(self.workers, subject.dropped) if subject.dropped else None
        self.step = 0
        if subject.dropout:
            add_dropout(self.workers, subject.dropout)

    def flops_per_image(self) -> float:
        pixels, labels = self.batches.batch(0)
        batch = (pixels[:2], labels[:2])
        return self.depth.flops_per_image(self.workers, batch) if self.depth else self.workers.flops_per_image(batch)

    def backward(self) -> float:
        """Gradients of the next step; returns the mean loss of the workers."""
        if self.depth:
            self.depth.draw((self.seed + 700) * 1_000_003 + self.step)
        pixels, labels = self.batches.batch(self.step)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        losses = self.workers.backward(
            [*zip(pixels.chunk(len(self.workers.copies)), labels.chunk(len(self.workers.copies)), strict=True)]
        )
        self.step += 1
        _, plan = next(self.plans)
        if plan is not self.workers.plan:
            self.workers.replan(plan)
        return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, settings: Settings) -> dict[str, float]:
    """Losses and errors of the dense model, with batch statistics of training images."""
    batches = Augmented(data.train, settings.workers * settings.rows, _STATISTICS_SEED)
    write_statistics(estimate_statistics(model, [batches.batch(step)[0] for step in range(STATISTICS_BATCHES)]))
    model.eval()
    found: dict[str, float] = {}
    for name, examples in (("held_out", data.held_out), ("test", data.test)):
        loss = wrong = 0.0
        for pixels, labels in zip(examples.pixels.split(250), examples.labels.split(250), strict=True):
            logits = model(pixel_values=pixels.contiguous(memory_format=torch.channels_last)).logits
            loss += cross_entropy(logits, labels, reduction="sum").item()
            wrong += (logits.argmax(-1) != labels).sum().item()
        found |= {f"{name}_loss": loss / len(examples.labels), f"{name}_error": wrong / len(examples.labels)}
    model.train()
    return found


def num_steps(cell: Cell, flops_per_image: float, data: Data, settings: Settings) -> int:
    """As many as the budget has."""
    deep = Training(Subject(DEEP), data, 0, settings)
    return round(cell.epochs * deep.batches.steps_per_epoch * deep.flops_per_image() / flops_per_image)


def costs(subject: Subject, settings: Settings) -> dict[str, float]:
    """Peak memory and bytes sent in a step."""
    shape = build(subject, 0, settings).config.to_dict() | {"image_size": SIZE}
    block = {key: value for key, value in block_of(subject, 0).items() if key != "redraw_interval"}
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": settings.momentum}}
    return costs_of_step(shape, block, settings.rows, settings.workers, optimizer)


def run(cell: Cell, subject: Subject, data: Data, settings: Settings = Settings()) -> dict[str, Any]:
    """Train, and return the figures as JSON."""
    before = time.process_time()
    training = Training(subject, data, cell.seed, settings)
    flops = training.flops_per_image()
    steps = num_steps(cell, flops, data, settings)
    optimizer = torch.optim.SGD(
        training.model.parameters(),
        lr=cell.rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=True,
        foreach=True,
    )
    torch.manual_seed(cell.seed)  # of dropout
    ends = [round(steps * (point + 1) / settings.points) for point in range(settings.points)]
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = cell.rate * rate_share(step, steps, settings.warm_up)
        losses.append(training.backward())
        optimizer.step()
        if not math.isfinite(losses[-1]):
            break
        if step + 1 in ends:
            curve.append(
                {
                    "step": step + 1,
                    "training_loss": sum(losses) / len(losses),
                    **evaluate(training.model, data, settings),
                }
            )
            losses.clear()
    return identity(cell, subject, settings) | {
        "steps": steps,
        "flops_per_image": flops,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "diverged": not (curve and curve[-1]["step"] == steps),
        "costs": costs(subject, settings),
        "curve": curve,
        "cpu_seconds": round(time.process_time() - before, 1),
    }


def identity(cell: Cell, subject: Subject, settings: Settings) -> dict[str, Any]:
    """All that decides a cell's figures, but for the code."""
    return {**asdict(cell), "described": subject.described(), "settings": asdict(settings)}


def rate_share(step: int, steps: int, warm_up: float) -> float:
    """Of the highest learning rate."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
