"""Training and test images through `datasets`, or scikit-learn's digits; what is wrong with them in one line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdp_deepspeed.messages import listed
from sdp_deepspeed.vision.config import Images

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Encoded images with their labels.

    Args:
        rows: of `datasets`; an image column decodes to PIL's images.
    """

    rows: Any
    image_column: str
    label_column: str

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def labels(self) -> Labels:
        """[N]."""
        return np.asarray(self.rows.with_format("numpy", columns=[self.label_column])[self.label_column][:], np.int64)

    @property
    def names(self) -> list[str]:
        """Of the classes; numbers where the data set has no names."""
        names = getattr(self.rows.features[self.label_column], "names", None)
        return list(names) if names else [str(number) for number in range(int(self.labels.max()) + 1)]

    @property
    def identity(self) -> str:
        """Of what is in it, and in which order, by the labels."""
        return hashlib.sha256(self.labels.tobytes()).hexdigest()[:16]

    def images(self, items: Sequence[int]) -> list[Any]:
        """PIL's images, RGB."""
        return [image.convert("RGB") for image in self.rows[list(items)][self.image_column]]


@dataclass(frozen=True)
class Splits:
    train: Split
    test: Split

    @property
    def names(self) -> list[str]:
        """Of the classes."""
        return max(self.train.names, self.test.names, key=len)


@cache
def open_splits(images: Images) -> Splits:
    """Download (hub), or open, once; every rank by itself, and `datasets` lets one of a machine at a time prepare.

    Raises:
        ValueError: no such data set, split or column, or one of another kind.
    """
    found = _digits() if images.path is None else _load(images)
    splits = [_split(found, name, images) for name in (images.train_split, images.test_split)]
    if images.num_train is not None and len(splits[0]) != images.num_train:
        raise ValueError(
            f"--data: {images.path} has {len(splits[0])} images in {images.train_split!r}, expected "
            f"{images.num_train}: give path for another copy of the data set"
        )
    return Splits(*splits)


def _load(images: Images) -> Any:
    import datasets

    if os.environ.get("RANK", "0") != "0":  # rank 0 shows the same
        datasets.disable_progress_bars()
    path = str(images.path)
    folder = Path(path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.exists() else path, images.subset)
    except Exception as error:  # of any kind: those of `datasets`, of pyarrow, of the network
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"--data: cannot open {path!r}: {reason or type(error).__name__}; expected a hub id that this machine can "
            "reach (log in where the data set asks for it), or a folder of parquet, arrow or image files"
        ) from None


def _split(found: Any, name: str, images: Images) -> Split:
    if name not in found:
        raise ValueError(f"--data: there is no split {name!r}, there are {listed(found)}: set train_split, test_split")
    rows = found[name]
    for key in ("image_column", "label_column"):
        if (column := getattr(images, key)) not in rows.column_names:
            raise ValueError(f"--data: {key}: no column {column!r}, the data set has {listed(rows.column_names)}")
    if len(rows) == 0:
        raise ValueError(f"--data: split {name!r} has no image")
    image_kind, label_kind = (rows.features[column] for column in (images.image_column, images.label_column))
    if type(image_kind).__name__ != "Image":
        raise ValueError(f"--data: image_column: {images.image_column!r} holds {image_kind}, expected images")
    if "int" not in str(getattr(label_kind, "dtype", "")):
        raise ValueError(f"--data: label_column: {images.label_column!r} holds {label_kind}, expected whole numbers")
    split = Split(rows, images.image_column, images.label_column)
    if (smallest := int(split.labels.min())) < 0:
        raise ValueError(
            f"--data: split {name!r} has labels of {smallest}: it is published without labels, take another"
        )
    return split


_NUM_TEST = 360  # a fifth; scikit-learn has no split of its own


def _digits() -> dict[str, Any]:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, split by class with a fixed seed."""
    import datasets

    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ValueError('--dataset digits needs scikit-learn: pip install "sdp_deepspeed[digits]"') from None
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    parts = train_test_split(np.arange(len(pixels)), test_size=_NUM_TEST, stratify=digits.target, random_state=0)
    return {
        name: datasets.Dataset.from_dict(
            {"image": list(pixels[items]), "label": digits.target[items].tolist()}, features=kinds
        )
        for name, items in zip(("train", "test"), map(np.sort, parts), strict=True)
    }
