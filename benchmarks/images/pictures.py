"""Fashion-MNIST for the image study: training, held-out and test images; batches with crops and flips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from published_images import read_split

SIZE, NUM_CLASSES = 28, 10
HELD_OUT = 6  # a sixth of the training images as published
_MEAN, _DEVIATION, _PADDING = 0.2860, 0.3530, 4


@dataclass(frozen=True)
class Examples:
    """
    Args:
        pixels: normalized, [images, 1, SIZE, SIZE].
        labels: [images].
    """

    pixels: torch.Tensor
    labels: torch.Tensor


def read_examples(folder: Path, num_images: int) -> tuple[Examples, Examples, Examples]:
    """Training, held-out and test examples. Learning rates are chosen on the held-out ones, which are training images
    as published that no cell trains on. Smaller training sets are parts of larger ones; classes are drawn at random."""
    train, test = (_normalized(folder, split) for split in ("train", "test"))
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
    most = len(order) - len(order) // HELD_OUT
    if not 0 < num_images <= most:
        raise ValueError(f"--images: got {num_images}, expected 1 to {most}; choose fewer")
    chosen, held_out = (Examples(train.pixels[own], train.labels[own]) for own in (order[:num_images], order[most:]))
    return chosen, held_out, test


def _normalized(folder: Path, split: str) -> Examples:
    pictures = read_split("fashion_mnist", folder, split)
    pixels = (torch.tensor(pictures.pixels).unsqueeze(1) / 255 - _MEAN) / _DEVIATION
    return Examples(pixels, torch.tensor(pictures.labels, dtype=torch.int64))


class Augmented:
    """Training batches: each epoch in an order of its own, without what does not fill a step. What a step has depends
    on the seed and the step only."""

    def __init__(self, examples: Examples, batch_size: int, seed: int) -> None:
        self.labels, self.batch_size, self.seed = examples.labels, batch_size, seed
        self.padded = pad(examples.pixels.squeeze(1), (_PADDING,) * 4, value=-_MEAN / _DEVIATION)  # black
        self.steps_per_epoch = len(self.labels) // batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels [batch_size, 1, SIZE, SIZE] and labels [batch_size]."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.labels), generator=generator)
        chosen = self._order[place * self.batch_size : (place + 1) * self.batch_size]
        generator = torch.Generator().manual_seed((self.seed + 500) * 1_000_003 + step)
        top, left = torch.randint(2 * _PADDING + 1, (2, self.batch_size, 1, 1), generator=generator)
        rows = torch.arange(SIZE).view(1, -1, 1)
        columns = torch.arange(SIZE).repeat(self.batch_size, 1, 1)
        is_mirrored = torch.rand(self.batch_size, generator=generator) < 0.5
        columns[is_mirrored] = columns[is_mirrored].flip(-1)
        pixels = self.padded[chosen.view(-1, 1, 1), top + rows, left + columns]
        return pixels.unsqueeze(1), self.labels[chosen]
