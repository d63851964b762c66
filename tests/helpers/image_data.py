"""Small sets of images as `datasets` has them, and as their authors publish them."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
from PIL import Image
from scipy.io import savemat

CLASSES = ("plane", "cat", "ship")
Split = tuple[np.ndarray, np.ndarray]
"""Images, uint8, and their labels."""


def rows(num: int, size: int = 8) -> dict[str, list[Any]]:
    """Images of noise; the label is the position modulo 3, and in the first pixel."""
    pixels = np.random.default_rng(0).integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    labels = [index % len(CLASSES) for index in range(num)]
    pixels[:, 0, 0, 0] = labels
    return {"img": [Image.fromarray(image) for image in pixels], "label": labels}


def dataset(num: int, size: int) -> Any:
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    return datasets.Dataset.from_dict(rows(num, size), features=features)


def write_folders(folder: Path, num_train: int, num_test: int) -> Path:
    """One folder for each class."""
    for name, num in (("train", num_train), ("test", num_test)):
        found = rows(num)
        for index, (image, label) in enumerate(zip(found["img"], found["label"], strict=True)):
            place = folder / name / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{index:03d}.png")
    return folder


def write_fashion_mnist(folder: Path, num_train: int = 12, num_test: int = 7) -> dict[str, Split]:
    """The published files, compressed ones for training."""
    splits = _splits((28, 28), num_train, num_test)
    for (pixels, labels), prefix in zip(splits.values(), ("train", "t10k"), strict=True):
        for array, name in ((pixels, "images-idx3-ubyte"), (labels, "labels-idx1-ubyte")):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            content = header + array.astype(np.uint8).tobytes()
            if prefix == "train":
                (folder / f"{prefix}-{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{prefix}-{name}").write_bytes(content)
    return splits


def write_cifar10(folder: Path) -> dict[str, Split]:
    """The unpacked archive for Python."""
    splits = _splits((32, 32, 3))
    files = {
        "batches.meta": {"label_names": [f"class {label}" for label in range(10)]},
        "test_batch": _batch(*splits["test"]),
    }
    parts = (np.array_split(array, 5) for array in splits["train"])
    for number, (pixels, labels) in enumerate(zip(*parts, strict=True), start=1):
        files[f"data_batch_{number}"] = _batch(pixels, labels)
    for name, content in files.items():
        path = folder / "cifar-10-batches-py" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(python_2_pickle(content))
    return splits


def write_cifar100(folder: Path) -> dict[str, Split]:
    """The archive for Python."""
    splits = _splits((32, 32, 3))
    files = {split: _batch(*found, key="fine_labels") for split, found in splits.items()}
    files["meta"] = {"fine_label_names": [f"class {label}" for label in range(100)]}
    with tarfile.open(folder / "cifar-100-python.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            data = python_2_pickle(content)
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return splits


def write_svhn(folder: Path) -> dict[str, Split]:
    """MATLAB files, in which the digit 0 is 10."""
    splits = _splits((32, 32, 3))
    for split, (pixels, labels) in splits.items():
        digits = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        savemat(folder / f"{split}_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0), "y": digits}, do_compression=True)
    return splits


def _splits(shape: tuple[int, ...], num_train: int = 15, num_test: int = 7) -> dict[str, Split]:
    """Images of noise, with the labels 0 to 9 in turn, which are also their first pixels."""
    splits = {}
    for seed, (name, num) in enumerate((("train", num_train), ("test", num_test))):
        pixels = np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8)
        labels = np.arange(num) % 10
        pixels.reshape(num, -1)[:, 0] = labels
        splits[name] = pixels, labels
    return splits


def _batch(pixels: np.ndarray, labels: np.ndarray, key: str = "labels") -> dict[str, Any]:
    rows = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)
    return {"data": rows, key: labels.tolist(), "batch_label": "of a test"}


_Pickler: Any = vars(pickle)["_Pickler"]  # in Python, so that it can be changed


class _Python2Pickler(_Pickler):
    """Strings are bytes, and functions of NumPy have their old place, as in CIFAR's files."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<I", len(data)) + data)
        self.memoize(value)

    def save_place(self, value: Any) -> None:
        place = f"c{value.__module__}\n{value.__name__}\n"
        self.write(place.replace("numpy._core", "numpy.core").encode())
        self.memoize(value)

    dispatch |= dict.fromkeys((str, bytes), save_string)
    dispatch |= dict.fromkeys((type, type(len), type(lambda: 0)), save_place)


def python_2_pickle(content: Any) -> bytes:
    """A pickle as Python 2 wrote it."""
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue()
