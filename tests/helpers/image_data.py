"""Small sets of images as `datasets` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

CLASSES = ("plane", "cat", "ship")


def rows(num: int, *, size: int = 8, width: int | None = None, seed: int = 0) -> dict[str, list[Any]]:
    """Images of noise, `size` high; the label is the position modulo 3, and in the first pixel."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (num, size, width or size, 3), dtype=np.uint8)
    labels = [index % len(CLASSES) for index in range(num)]
    pixels[:, 0, 0, 0] = labels
    return {"img": [Image.fromarray(image) for image in pixels], "label": labels}


def dataset(num: int, **shape: int) -> Any:
    found = rows(num, **shape)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    return datasets.Dataset.from_dict(found, features=features)


def write_folders(folder: Path, num_train: int = 12, num_test: int = 7, **shape: int) -> Path:
    """One folder for each class."""
    for name, num in (("train", num_train), ("test", num_test)):
        found = rows(num, **shape)
        for index, (image, label) in enumerate(zip(found["img"], found["label"], strict=True)):
            place = folder / name / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{index:03d}.png")
    return folder
