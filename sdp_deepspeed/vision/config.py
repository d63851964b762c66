"""The --data JSON of launch/train_vision.py: which images, how they become what the model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import pydantic

from sdp_deepspeed.messages import did_you_mean

Augmentation = Literal["crop_and_flip", "crop", "resized_crop", "none"]


@dataclass(frozen=True)
class KnownDataset:
    """What is usual for a data set, and how the hub has it.

    Args:
        path: on the hub; None for what a package brings.
        num_train: images of the training split.
        padding: pixels on each side, from which "crop" and "crop_and_flip" take a window.
    """

    path: str | None
    image_column: str
    label_column: str
    image_size: int
    augmentation: Augmentation
    num_train: int
    padding: int = 4
    subset: str | None = None
    test_split: str = "test"


KNOWN: Mapping[str, KnownDataset] = {
    "cifar10": KnownDataset("uoft-cs/cifar10", "img", "label", 32, "crop_and_flip", 50_000),
    "cifar100": KnownDataset("uoft-cs/cifar100", "img", "fine_label", 32, "crop_and_flip", 50_000),
    # A mirrored digit is another one, or none.
    "svhn": KnownDataset("ufldl-stanford/svhn", "image", "label", 32, "crop", 73_257, subset="cropped_digits"),
    "imagenet": KnownDataset(
        "ILSVRC/imagenet-1k", "image", "label", 224, "resized_crop", 1_281_167, test_split="validation"
    ),
    "digits": KnownDataset(None, "image", "label", 8, "crop", 1437, padding=1),
}


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Fields are keys of the JSON. Those that are None take what is usual for `dataset`.

    Args:
        dataset: "cifar10", "cifar100", "svhn", "imagenet", "digits" (scikit-learn's, no network), or None with all of
            `path`, the two columns and `image_size` given.
        path: hub id, or a local folder: parquet or arrow files, one folder per class, or what `save_to_disk` wrote.
        subset: the data set's configuration.
        image_column, label_column: names.
        train_split, test_split: names.
        image_size: side S of the square images that the model gets, in pixels.
        augmentation: "crop_and_flip" and "crop": a window of S x S after padding; "resized_crop": a random part of the
            image, flipped or not; "none".
        padding: black pixels on each side before a crop.
        workers: threads per rank that decode images, for "resized_crop"; no effect on what is trained.
        seed: order of the images and their augmentation.

    Raises:
        ValueError: a value that cannot be used.
    """

    dataset: str | None = None
    path: str | None = None
    subset: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    image_size: int | None = None
    augmentation: Augmentation | None = None
    padding: int | None = None
    workers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        problems = _wrong_types(self) or [*_out_of_range(self), *_incomplete(self)]
        if problems:
            raise ValueError("--data: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageConfig:
        """A config from JSON; unknown keys are a ValueError that names them and the nearest known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [f"unknown key {key!r} ({did_you_mean(key, known)})" for key in values if key not in known]
        if unknown:
            raise ValueError("--data: " + "; ".join(unknown))
        return cls(**values)

    def filled(self) -> Images:
        """With what is usual for the data set where nothing else is said."""
        known = KNOWN.get(self.dataset) if self.dataset else None
        usual = vars(known) if known else {"augmentation": "none", "padding": 4, "subset": None, "test_split": "test"}
        # A copy of a data set elsewhere has no configurations of the hub's.
        given = {"subset": None, "num_train": None} if self.path is not None else {}
        given |= {name: value for name, value in vars(self).items() if value is not None and name != "dataset"}
        return Images(**{"num_train": None, **usual, **given})


@dataclass(frozen=True, kw_only=True)
class Images:
    """As `ImageConfig`, with nothing left open.

    Args:
        path: None for scikit-learn's digits.
        num_train: what the training split must have; None where nobody knows.
    """

    path: str | None
    subset: str | None
    image_column: str
    label_column: str
    train_split: str
    test_split: str
    image_size: int
    augmentation: Augmentation
    padding: int
    workers: int
    seed: int
    num_train: int | None

    @property
    def decodes_on_demand(self) -> bool:
        """Whether images stay encoded until they are taken, as large ones of many sizes must."""
        return self.augmentation == "resized_crop"


def _wrong_types(config: ImageConfig) -> list[str]:
    problems = []
    for name, hint in get_type_hints(ImageConfig).items():
        value = getattr(config, name)
        try:
            pydantic.TypeAdapter(hint).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            expected = " or ".join(dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors()))
            problems.append(f"{name} is {value!r}, expected {expected}")
    return problems


def _out_of_range(config: ImageConfig) -> list[str]:
    smallest = {"image_size": 1, "padding": 0, "workers": 1, "seed": 0}
    return [
        f"{name} is {value}, expected at least {least}"
        for name, least in smallest.items()
        if (value := getattr(config, name)) is not None and value < least
    ]


def _incomplete(config: ImageConfig) -> list[str]:
    if config.dataset is not None:
        if config.dataset not in KNOWN:
            return [
                f"dataset is {config.dataset!r} ({did_you_mean(config.dataset, KNOWN)}); others are named by path, "
                "with their columns and image_size"
            ]
        if config.dataset == "digits" and (config.path or config.subset):
            return ["digits are scikit-learn's own: path and subset have no effect on them"]
        return []
    needed = ("path", "image_column", "label_column", "image_size")
    if missing := [name for name in needed if getattr(config, name) is None]:
        return [f"without dataset ({', '.join(KNOWN)}) it needs {', '.join(missing)}"]
    return []
