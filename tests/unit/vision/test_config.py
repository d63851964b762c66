"""The --data JSON: what is usual for a data set, what a user says instead, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.vision.config import KNOWN, ImageConfig


@pytest.mark.parametrize(
    ("name", "columns", "subset", "test_split", "augmentation"),
    [
        ("cifar10", ("img", "label"), None, "test", "crop_and_flip"),
        ("cifar100", ("img", "fine_label"), None, "test", "crop_and_flip"),
        ("svhn", ("image", "label"), "cropped_digits", "test", "crop"),
        ("imagenet", ("image", "label"), None, "validation", "resized_crop"),
        ("digits", ("image", "label"), None, "test", "crop"),
    ],
)
def test_what_is_usual(
    name: str, columns: tuple[str, str], subset: str | None, test_split: str, augmentation: str
) -> None:
    images = ImageConfig(dataset=name).filled()
    assert (images.image_column, images.label_column) == columns
    assert (images.subset, images.test_split, images.augmentation) == (subset, test_split, augmentation)
    assert (images.num_train, images.image_size) == (KNOWN[name].num_train, KNOWN[name].image_size)
    assert images.decodes_on_demand == (name == "imagenet")


def test_what_is_said_comes_first() -> None:
    given = {"padding": 2, "image_size": 16, "seed": 5, "augmentation": "none", "workers": 1}
    images = ImageConfig.from_dict({"dataset": "svhn", **given}).filled()
    assert {name: getattr(images, name) for name in given} == given
    copy = ImageConfig(dataset="svhn", path="mine").filled()
    assert (copy.path, copy.subset, copy.num_train) == ("mine", None, None), "a copy may have other files and counts"
    other = ImageConfig(path="a/b", image_column="i", label_column="l", image_size=9, subset="s").filled()
    assert (other.augmentation, other.test_split, other.subset, other.num_train) == ("none", "test", "s", None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "cifar11"}, "dataset is 'cifar11' (did you mean 'cifar10'?)"),
        ({"datset": "cifar10"}, "unknown key 'datset' (did you mean 'dataset'?)"),
        ({"path": "x"}, "it needs image_column, label_column, image_size"),
        ({"dataset": "digits", "path": "x"}, "path and subset have no effect"),
        ({"dataset": "cifar10", "image_size": "32"}, "image_size is '32', expected a valid integer"),
        ({"dataset": "cifar10", "augmentation": "flip"}, "augmentation is 'flip'"),
        ({"dataset": "cifar10", "padding": -1}, "padding is -1, expected at least 0"),
        ({"dataset": "cifar10", "image_size": 0, "workers": 0}, "image_size is 0, expected at least 1; workers is 0"),
    ],
)
def test_mistakes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^--data: ") as error:
        ImageConfig.from_dict(values)
    assert words in str(error.value)
