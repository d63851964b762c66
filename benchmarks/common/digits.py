"""Batches of scikit-learn's 1797 handwritten digits, which need no network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def digit_batches(size: int, rows: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches as Transformers' image classifiers take them, each digit drawn alike.

    Args:
        size: height and width in pixels; the digits' 8 x 8 are enlarged.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("--model: images are scikit-learn's digits: pip install scikit-learn") from None
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.as_tensor(digits.target, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(0, len(labels), (rows,), generator=generator)
        yield {"pixel_values": images[drawn], "labels": labels[drawn]}
