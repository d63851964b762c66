"""Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, from a folder of the files that their authors publish, or from the hub.

To add a dataset, add its name to `PUBLISHED`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True)
class Pictures:
    """The images of a split.

    Args:
        pixels: [images, height, width] or [images, height, width, 3], uint8.
        labels: [images].
        classes: names, by label.
    """

    pixels: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]


def load_published(name: str, folder: str | None) -> DatasetDict:
    """Load a dataset with the splits `train` and `test` and the columns `image` and `label`.

    Args:
        name: a key of `PUBLISHED`.
        folder: of the published files; None for the hub.

    Raises:
        ValueError, OSError: a file is missing or damaged, or the hub cannot be reached.
    """
    if folder is not None:
        return DatasetDict({split: _dataset(read_split(name, folder, split)) for split in ("train", "test")})
    hub = PUBLISHED[name].hub
    try:
        splits = load_dataset(*hub.path)
    except OSError as error:
        raise OSError(
            f"{name}: {error}; without network, set data.folder to a folder of the published files"
        ) from error
    columns = {hub.image_column: "image", hub.label_column: "label"}
    renamed = {old: new for old, new in columns.items() if old != new}
    return splits.select_columns([*columns]).rename_columns(renamed)


def read_split(name: str, folder: str | Path, split: str) -> Pictures:
    """Read the published files of the split "train" or "test".

    Raises:
        ValueError, OSError: a file is missing or damaged.
    """
    pictures = PUBLISHED[name].read(Path(folder), split)
    pixels, labels = pictures.pixels, pictures.labels
    if len(pixels) != len(labels) or not len(labels):
        raise ValueError(f"{folder}: {len(pixels)} images and {len(labels)} labels of {name}, {split}; download again")
    if labels.min() < 0 or labels.max() >= len(pictures.classes):
        wrong = f"labels from {labels.min()} to {labels.max()}, expected 0 to {len(pictures.classes) - 1}"
        raise ValueError(f"{folder}: {wrong}, in {name}, {split}; download the files again")
    return pictures


def _dataset(pictures: Pictures) -> Dataset:
    features = Features({"image": Image(), "label": ClassLabel(names=[*pictures.classes])})
    return Dataset.from_dict({"image": [*pictures.pixels], "label": pictures.labels.tolist()}, features=features)


def _read_fashion_mnist(folder: Path, split: str) -> Pictures:
    """Files as MNIST's, compressed or not."""
    prefix = "train" if split == "train" else "t10k"
    pixels = _read_idx(folder, f"{prefix}-images-idx3-ubyte", num_dims=3)
    return Pictures(pixels, _read_idx(folder, f"{prefix}-labels-idx1-ubyte", num_dims=1), FASHION)


def _read_idx(folder: Path, name: str, num_dims: int) -> np.ndarray:
    """Read an array of bytes: two zeros, the type 8, the number of dims, the size of each, the values."""
    path = _existing(folder, f"{name}.gz", name)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    start = 4 + 4 * num_dims
    if data[:4] != bytes((0, 0, 8, num_dims)) or len(data) < start:
        raise _damaged(path, f"it is no idx file of bytes in {num_dims} dims")
    shape = struct.unpack(f">{num_dims}I", data[4:start])
    if len(data) - start != np.prod(shape, dtype=np.int64):
        raise _damaged(path, f"{len(data) - start} bytes, expected {' x '.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_cifar(archive: str, inner: str, batches: Mapping[str, Sequence[str]], meta: str, key: str) -> Any:
    """A reader of the archive for Python, packed or not.

    Args:
        archive: its file name.
        inner: the folder in it.
        batches: names of the files of each split.
        meta: name of the file with the names of the classes.
        key: of the labels, and with "_names" in place of the last "s" of the names; "labels" or "fine_labels".
    """

    def read(folder: Path, split: str) -> Pictures:
        names = [meta, *batches[split]]
        classes, *parts = (_unpickled(folder, archive, f"{inner}/{name}") for name in names)
        try:
            pixels = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.concatenate([np.asarray(part[key], dtype=np.int64) for part in parts])
            return Pictures(pixels.astype(np.uint8), labels, classes[key.replace("labels", "label_names")])
        except (KeyError, ValueError, TypeError) as error:
            raise _damaged(folder, f"{inner} has unexpected content ({error})") from error

    return read


def _unpickled(folder: Path, archive: str, member: str) -> Any:
    """An object from a file of the unpacked archive, or else of the archive."""
    path = _existing(folder, member, Path(member).name, archive)
    try:
        if path.name != archive:
            data = path.read_bytes()
        else:
            with tarfile.open(path) as files:
                found = files.extractfile(member)
                assert found is not None
                data = found.read()
        return _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    except (OSError, EOFError, KeyError, ValueError, zlib.error, tarfile.TarError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Creates NumPy arrays and Python's containers only, since a pickle can name any function to call."""

    _MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES and name == "_reconstruct":
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def _read_svhn(folder: Path, split: str) -> Pictures:
    """Cropped digits; the files have 10 for the digit 0."""
    from scipy.io import loadmat

    path = _existing(folder, f"{split}_32x32.mat")
    try:
        content = loadmat(path)
        pixels, labels = content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1).astype(np.int64)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError, zlib.error) as error:
        raise _damaged(path, error) from error
    return Pictures(np.ascontiguousarray(pixels), np.where(labels == 10, 0, labels), [*map(str, range(10))])


def _existing(folder: Path, *names: str) -> Path:
    """The first of some files that exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: found none of {', '.join(names)}; download it there, or correct data.folder")


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path}: {reason}; the file is damaged: download it again")


@dataclass(frozen=True)
class OnHub:
    """Arguments of `load_dataset`, and the columns."""

    path: Sequence[str]
    image_column: str = "image"
    label_column: str = "label"


@dataclass(frozen=True)
class Published:
    """
    Args:
        read: reads a split, "train" or "test", from a folder of the published files.
    """

    hub: OnHub
    read: Callable[[Path, str], Pictures]


_CIFAR_10 = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_CIFAR_100 = {"train": ["train"], "test": ["test"]}
PUBLISHED = {
    "fashion_mnist": Published(OnHub(["zalando-datasets/fashion_mnist"]), _read_fashion_mnist),
    "cifar10": Published(
        OnHub(["uoft-cs/cifar10"], image_column="img"),
        _read_cifar("cifar-10-python.tar.gz", "cifar-10-batches-py", _CIFAR_10, "batches.meta", "labels"),
    ),
    "cifar100": Published(
        OnHub(["uoft-cs/cifar100"], image_column="img", label_column="fine_label"),
        _read_cifar("cifar-100-python.tar.gz", "cifar-100-python", _CIFAR_100, "meta", "fine_labels"),
    ),
    "svhn": Published(OnHub(["ufldl-stanford/svhn", "cropped_digits"]), _read_svhn),
}
