"""Crops and flips of whole batches; what is drawn for a sample depends on the seed and its position in the run alone.

So a resumed run, and one with other ranks or micro-batches, sees the same pixels. Transforms of torchvision would draw
once for a batch, and from a generator whose state depends on everything before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Draws = npt.NDArray[np.float64]
Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels

NUM_CROP_DRAWS = 3  # where from top and left, and whether flipped
_TRIES = 10
NUM_PART_DRAWS = 4 * _TRIES + 1
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # usual for ImageNet
_KEPT = 224 / 256  # of the shorter side, in the usual evaluation


def crop(images: Tensor, draws: Draws, *, padding: int, flip: bool) -> Tensor:
    """A window of the images' own size after padding, mirrored with probability 1/2.

    Args:
        images: [B, 3, S, S] uint8.
        draws: [B, NUM_CROP_DRAWS] in [0, 1).
        padding: black pixels on each side.
        flip: whether to mirror any.

    Returns:
        [B, 3, S, S] uint8.
    """
    num_images, num_channels, _, size = images.shape
    padded = F.pad(images, (padding,) * 4)
    corners = torch.from_numpy(np.floor(draws[:, :2] * (2 * padding + 1)).astype(np.int64))
    steps = torch.arange(size, dtype=torch.int64, device="cpu")
    rows, columns = (corner[:, None] + steps for corner in corners.T)
    if flip:
        mirrored = torch.from_numpy(draws[:, 2] < 0.5)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    which = torch.arange(num_images, dtype=torch.int64, device="cpu")[:, None, None, None]
    channels = torch.arange(num_channels, dtype=torch.int64, device="cpu")[None, :, None, None]
    return padded[which, channels, rows[:, None, :, None], columns[:, None, None, :]]


def random_part(size: tuple[int, int], draws: Sequence[float]) -> tuple[Box, bool]:
    """A part of an image with 8% to 100% of its area and a ratio of sides of 3:4 to 4:3, and whether to mirror it.

    Args:
        size: width and height in pixels.
        draws: NUM_PART_DRAWS in [0, 1).
    """
    width, height = size
    *tries, mirror = draws
    for first in range(0, 4 * _TRIES, 4):
        area, ratio, left, upper = tries[first : first + 4]
        pixels = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        shape = math.exp(math.log(_RATIO[0]) + ratio * (math.log(_RATIO[1]) - math.log(_RATIO[0])))
        w, h = math.sqrt(pixels * shape), math.sqrt(pixels / shape)
        if w <= width and h <= height:
            x, y = left * (width - w), upper * (height - h)
            return (x, y, x + w, y + h), mirror < 0.5
    return middle(size, kept=1.0), mirror < 0.5


def middle(size: tuple[int, int], *, kept: float = _KEPT) -> Box:
    """The square in the middle whose side is `kept` of the shorter one."""
    width, height = size
    side = kept * min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return x, y, x + side, y + side
