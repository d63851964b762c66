"""Published image datasets: what is read from a folder of their files, and what is refused."""

from __future__ import annotations

import gzip
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from published_images import load_published, read_split
from tests.helpers import image_data

WRITERS = {
    "fashion_mnist": image_data.write_fashion_mnist,
    "cifar10": image_data.write_cifar10,
    "cifar100": image_data.write_cifar100,
    "svhn": image_data.write_svhn,
}


@pytest.mark.parametrize("name", WRITERS)
def test_images_and_labels_are_those_in_the_files(name: str, tmp_path: Path) -> None:
    written = WRITERS[name](tmp_path)
    loaded = load_published(name, str(tmp_path))
    for split, (pixels, labels) in written.items():
        assert np.array_equal(np.stack([np.asarray(image) for image in loaded[split]["image"]]), pixels)
        assert loaded[split]["label"] == labels.tolist()
    assert loaded["train"].features["label"].num_classes == (100 if name == "cifar100" else 10)


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path)) + r".*download it there"):
        read_split(name, tmp_path, "test")


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def of_another_shape(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data)[:-1])


def flipped_type(data: bytes) -> bytes:
    content = gzip.decompress(data)
    return gzip.compress(content[:2] + b"\x0d" + content[3:])


def calls(_: bytes) -> bytes:
    return pickle.dumps(os.getcwd, protocol=2)


def relabelled(change: Callable[[list[int]], dict[str, list[int]]]) -> Callable[[bytes], bytes]:
    """A batch of CIFAR-10 with what `change` makes of its labels."""

    def damage(data: bytes) -> bytes:
        content = pickle.loads(data, encoding="latin1")
        return pickle.dumps({"data": content["data"]} | change(content["labels"]), protocol=2)

    return damage


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("fashion_mnist", "train-images-idx3-ubyte.gz", half),
        ("fashion_mnist", "train-images-idx3-ubyte.gz", of_another_shape),
        ("fashion_mnist", "train-images-idx3-ubyte.gz", flipped_type),
        ("cifar10", "cifar-10-batches-py/data_batch_2", half),
        ("cifar10", "cifar-10-batches-py/data_batch_2", calls),
        ("cifar10", "cifar-10-batches-py/data_batch_2", relabelled(lambda _: {})),
        ("cifar10", "cifar-10-batches-py/data_batch_2", relabelled(lambda labels: {"labels": [10] * len(labels)})),
        ("cifar10", "cifar-10-batches-py/data_batch_2", relabelled(lambda labels: {"labels": [-1] * len(labels)})),
        ("cifar10", "cifar-10-batches-py/data_batch_2", relabelled(lambda labels: {"labels": labels[1:]})),
        ("cifar100", "cifar-100-python.tar.gz", half),
        ("svhn", "train_32x32.mat", half),
    ],
)
def test_a_damaged_file_is_an_error(name: str, file: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + r".*download"):
        read_split(name, tmp_path, "train")
