"""A small convolutional model with batch norms, and what ranks train it on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import Branch, register
from tests.helpers.models import config

Batch = tuple[torch.Tensor, torch.Tensor]
WIDTH, NUM_LAYERS, NUM_CLASSES = 6, 4, 5


class Layer(nn.Module):
    """A residual layer whose norms are inside of its branch."""

    def __init__(self, width: int = WIDTH, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(width, momentum=momentum) for _ in range(2)]
        convolutions = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


register(Layer, Branch("residual", body="body"))


class Net(nn.Module):
    """Images and classes in, a loss out; logits without classes."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH, momentum=momentum)
        self.layers = nn.ModuleList(Layer(momentum=momentum) for _ in range(NUM_LAYERS))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: torch.Tensor, classes: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.stem(images))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits if classes is None else nn.functional.cross_entropy(logits, classes)


def batches(rank: int, num: int, seed: int = 0) -> list[Batch]:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [
        (
            torch.randn(4, 3, 5, 5, generator=generator) * (1 + rank) + rank,
            torch.randint(NUM_CLASSES, (4,), generator=generator),
        )
        for _ in range(num)
    ]


def settings(**block: Any) -> dict[str, Any]:
    """Of a DeepSpeed run."""
    accumulation = block.pop("accumulation", 1)
    found = config(**block) | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation}
    found.pop("train_batch_size", None)
    return found


def train(engine: Any, rank: int, *, num_steps: int, seed: int = 0) -> list[float]:
    """This rank's losses."""
    losses = []
    for images, classes in batches(rank, num_steps, seed):
        loss = engine(images, classes)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def statistics_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all running statistics that this rank stores."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): buffer for name, buffer in module.named_buffers()}
    found = {name: buffer.detach().clone() for name, buffer in buffers.items() if name.endswith(kinds)}
    return {name: value for name, value in found.items() if value.numel()}


def means(by_rank: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Over the ranks that have each; of counts the largest."""
    names = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    of_ranks = {name: torch.stack([found[name] for found in by_rank if name in found]) for name in names}
    return {
        name: values.double().mean(0).to(values.dtype) if values.is_floating_point() else values.amax(0)
        for name, values in of_ranks.items()
    }
