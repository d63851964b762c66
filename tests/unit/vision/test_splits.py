"""Local data of the hub's columns in each form, scikit-learn's digits, and data that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_deepspeed.vision.config import ImageConfig, Images
from sdp_deepspeed.vision.splits import open_splits
from tests.helpers.image_data import CLASSES, write_disk, write_folders, write_parquet


@pytest.fixture(autouse=True)
def no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def images(path: Path, **options: Any) -> Images:
    given: dict[str, Any] = {"image_column": "img", "label_column": "label", "image_size": 8} | options
    return ImageConfig(path=str(path), **given).filled()


@pytest.mark.parametrize("write", [write_disk, write_parquet])
def test_local_copies(tmp_path: Path, write: Callable[..., Path]) -> None:
    splits = open_splits(images(write(tmp_path / "data")))
    assert (len(splits.train), len(splits.test), splits.names) == (12, 7, list(CLASSES))
    assert splits.train.labels.tolist() == [0, 1, 2] * 4
    assert splits.train.labels.dtype == np.int64
    assert splits.train.identity != splits.test.identity
    first, third = splits.train.images([0, 2])
    assert (first.size, first.mode) == ((8, 8), "RGB")
    assert (first.getpixel((0, 0))[0], third.getpixel((0, 0))[0]) == (0, 2)


def test_folders_of_classes(tmp_path: Path) -> None:
    splits = open_splits(images(write_folders(tmp_path / "data"), image_column="image"))
    assert (len(splits.train), splits.names) == (12, sorted(CLASSES))


def test_classes_without_names(tmp_path: Path) -> None:
    assert open_splits(images(write_disk(tmp_path / "data", named=False))).names == ["0", "1", "2"]


def test_digits() -> None:
    pytest.importorskip("sklearn")
    splits = open_splits(ImageConfig(dataset="digits").filled())
    assert (len(splits.train), len(splits.test), splits.names) == (1437, 360, [str(n) for n in range(10)])
    assert np.bincount(splits.test.labels).min() >= 34, "each class alike"
    assert splits.train.images([0])[0].size == (8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_split": "training"}, "there is no split 'training', there are train, test"),
        ({"image_column": "image"}, "image_column: no column 'image', the data set has img, label"),
        ({"label_column": "fine_label"}, "label_column: no column 'fine_label', the data set has img, label"),
        ({"image_column": "label"}, "image_column: 'label' holds"),
        ({"label_column": "img"}, "label_column: 'img' holds"),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, options: dict[str, str], words: str) -> None:
    write_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"^--data: ") as error:
        open_splits(images(tmp_path / "data", **options))
    assert words in str(error.value)


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"^--data: cannot open '.*; expected a hub id"):
            open_splits(images(place))


def test_another_number_of_images_than_the_data_set_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub gives is counted; --epochs made steps of it."""
    import datasets

    found = datasets.load_from_disk(str(write_disk(tmp_path / "data")))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: found)
    with pytest.raises(ValueError, match="uoft-cs/cifar10 has 12 images in 'train', expected 50000: give path"):
        open_splits(ImageConfig(dataset="cifar10").filled())
