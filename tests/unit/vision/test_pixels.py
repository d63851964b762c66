"""Images as a model takes them: in memory, decoded when they are taken, normalized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sdp_deepspeed.data import PreparedDataError
from sdp_deepspeed.vision.config import ImageConfig
from sdp_deepspeed.vision.pixels import Normalization, Pixels
from sdp_deepspeed.vision.splits import Split
from tests.helpers.image_data import dataset

SPLIT = Split(dataset(6), "img", "label")
IMAGES = ImageConfig(
    path="x", image_column="img", label_column="label", image_size=8, augmentation="crop_and_flip", padding=2
).filled()
ITEMS = np.array([3, 1])


def raw(split: Split, items: np.ndarray) -> torch.Tensor:
    pictures = np.stack([np.array(image) for image in split.images(items.tolist())])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2)


def test_small_images_are_normalized_by_their_own_mean() -> None:
    pixels = Pixels(SPLIT, IMAGES)
    whole = pixels.plain(np.arange(6))
    assert whole.dtype == torch.float32
    assert torch.allclose(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(whole.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    assert torch.equal(pixels.plain(ITEMS), pixels.normalization(raw(SPLIT, ITEMS)))
    assert pixels.labels(ITEMS).tolist() == [0, 1]
    pixels.labels(ITEMS)[:] = 7
    assert pixels.labels(ITEMS).tolist() == [0, 1], "a copy"
    other = Pixels(SPLIT, IMAGES, Normalization([0.5] * 3, [0.25] * 3))
    assert torch.allclose(other.plain(ITEMS), (raw(SPLIT, ITEMS) / 255 - 0.5) / 0.25)


def test_a_channel_without_contrast_is_left_as_it_is() -> None:
    assert Normalization.of(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)).std == [1.0] * 3


def test_augmentation_depends_on_the_position_in_the_run() -> None:
    pixels = Pixels(SPLIT, IMAGES)
    one = pixels.augmented(ITEMS, np.array([10, 11]), seed=0)
    assert torch.equal(one[1:], pixels.augmented(ITEMS[1:], np.array([11]), seed=0))
    assert not torch.equal(one, pixels.augmented(ITEMS, np.array([12, 13]), seed=0))
    assert not torch.equal(one, pixels.augmented(ITEMS, np.array([10, 11]), seed=1))
    plain = Pixels(SPLIT, replace(IMAGES, augmentation="none"))
    assert torch.equal(plain.augmented(ITEMS, ITEMS, seed=0), plain.plain(ITEMS))


def test_images_of_another_size_are_resized() -> None:
    assert Pixels(Split(dataset(2, size=16), "img", "label"), IMAGES).plain(np.arange(2)).shape == (2, 3, 8, 8)


def test_large_images_are_decoded_when_they_are_taken() -> None:
    images = replace(IMAGES, augmentation="resized_crop", workers=2)
    split = Split(dataset(4, size=20, width=30), "img", "label")
    pixels = Pixels(split, images)
    assert pixels.plain(ITEMS).shape == (2, 3, 8, 8)
    assert pixels.normalization.mean == [0.485, 0.456, 0.406]
    parts = pixels.augmented(ITEMS, ITEMS, seed=0)
    assert torch.equal(parts[1:], pixels.augmented(ITEMS[1:], ITEMS[1:], seed=0))
    assert not torch.equal(parts, pixels.augmented(ITEMS, ITEMS + 2, seed=0))


def test_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp_deepspeed.vision.pixels._LARGEST_IN_MEMORY", 3 * 64 * 5)
    with pytest.raises(ValueError, match='6 images of 8 x 8 take 0 GiB on each rank: set augmentation "resized_crop"'):
        Pixels(SPLIT, IMAGES)


def test_an_image_that_cannot_be_decoded(tmp_path: Path) -> None:
    import datasets

    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"img": [str(bad)], "label": [0]}, features=features)
    with pytest.raises(PreparedDataError, match="an image among 0 cannot be decoded"):
        Pixels(Split(rows, "img", "label"), IMAGES)
