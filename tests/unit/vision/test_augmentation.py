"""Windows and mirrors: each where its draws say."""

from __future__ import annotations

import numpy as np
import torch

from sdp_deepspeed.data.shuffle import uniform
from sdp_deepspeed.vision.augmentation import NUM_CROP_DRAWS, NUM_PART_DRAWS, crop, middle, random_part

IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)


def test_a_window_after_padding() -> None:
    draws = np.array([[0.0, 0.999, 0.9], [0.5, 0.5, 0.1]])  # to the upper right; the middle, mirrored
    cut = crop(IMAGES, draws, padding=1, flip=True)
    assert cut.dtype == torch.uint8
    assert torch.equal(cut[0, :, 1:, :3], IMAGES[0, :, :3, 1:])
    assert cut[0, :, 0].sum() == cut[0, :, :, 3].sum() == 0, "black beyond the image"
    assert torch.equal(cut[1], IMAGES[1].flip(-1))
    assert torch.equal(crop(IMAGES, draws, padding=1, flip=False)[1], IMAGES[1])
    assert torch.equal(crop(IMAGES, draws, padding=0, flip=False), IMAGES)


def test_every_window_and_half_of_the_mirrors() -> None:
    draws = uniform(np.arange(4000), NUM_CROP_DRAWS, seed=3)
    assert draws.shape == (4000, 3)
    assert 0 <= draws.min() < draws.max() < 1
    corners = np.floor(draws[:, :2] * 9).astype(int)
    assert np.bincount(corners[:, 0] * 9 + corners[:, 1], minlength=81).min() > 20
    assert abs((draws[:, 2] < 0.5).mean() - 0.5) < 0.03
    assert np.array_equal(uniform(np.arange(5, 7), 3, seed=3), draws[5:7]), "by the position alone"
    assert not np.array_equal(uniform(np.arange(5, 7), 3, seed=4), draws[5:7])


def test_parts_of_an_image() -> None:
    areas = []
    for draws in uniform(np.arange(300), NUM_PART_DRAWS, seed=0).tolist():
        (left, upper, right, lower), _ = random_part((50, 30), draws)
        assert 0 <= left < right <= 50
        assert 0 <= upper < lower <= 30
        assert 3 / 4 - 1e-9 <= (right - left) / (lower - upper) <= 4 / 3 + 1e-9
        areas.append((right - left) * (lower - upper) / 1500)
    assert min(areas) < 0.12
    assert 0.5 < max(areas) < 1
    box, mirrored = random_part((1000, 10), [0.999, *[0.5] * 39, 0.1])
    assert (box, mirrored) == ((495.0, 0.0, 505.0, 10.0), True), "none fits: the middle"


def test_the_middle() -> None:
    assert middle((512, 256)) == (144, 16, 368, 240)
