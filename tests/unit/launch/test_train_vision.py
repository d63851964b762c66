"""Images: what is random depends on (seed, epoch, index), and their order not on the number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.image_data import dataset, write_fashion_mnist
from tests.helpers.programs import error_of
from train_vision import EpochSampler, Images, Pixels

SIZE = 8


def pixels(*, seed: int = 0, size: int = 12, **options: Any) -> Pixels:
    data = Images("", SIZE, image_column="img", **options)
    return Pixels(dataset(6, size=size), data, seed)


@pytest.mark.parametrize("padding", [2, None])
def test_augmentation_depends_on_seed_epoch_and_index_alone(padding: int | None) -> None:
    images = pixels(padding=padding)
    first = images[(1, 3)]["pixel_values"]
    torch.rand(7)
    assert torch.equal(pixels(padding=padding)[(1, 3)]["pixel_values"], first)
    others = [images[(epoch, 3)]["pixel_values"] for epoch in range(2, 12)]
    others += [pixels(padding=padding, seed=seed)[(1, 3)]["pixel_values"] for seed in range(1, 11)]
    assert not all(torch.equal(other, first) for other in others[:10])
    assert not all(torch.equal(other, first) for other in others[10:])
    assert {other.shape for other in others} == {(3, SIZE, SIZE)}


def test_a_window_of_no_padding_is_the_image_as_it_is_tested() -> None:
    images = pixels(padding=0, flip=False, size=SIZE)
    assert torch.equal(images[(5, 2)]["pixel_values"], images[2]["pixel_values"])
    assert images[2]["labels"] == 2


def test_half_of_the_images_are_mirrored() -> None:
    images = pixels(padding=0, size=SIZE)
    plain = images[1]["pixel_values"]
    found = [images[(epoch, 1)]["pixel_values"] for epoch in range(20)]
    mirrored = [torch.equal(one, plain.flip(-1)) for one in found]
    assert all(torch.equal(one, plain) for one, is_mirrored in zip(found, mirrored, strict=True) if not is_mirrored)
    assert 0 < sum(mirrored) < 20


def sampler(*, epoch: float, batch: int = 2, accumulation: int = 1, ranks: int = 1) -> EpochSampler:
    args = SimpleNamespace(seed=0, train_batch_size=batch, gradient_accumulation_steps=accumulation, world_size=ranks)
    trainer: Any = SimpleNamespace(args=args, train_dataset=range(19), state=SimpleNamespace(epoch=epoch))
    return EpochSampler(trainer)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """Whatever divides a step of 8 images among ranks; in the middle of an epoch it is the same."""
    first = list(sampler(epoch=0, batch=8))
    assert len(first) == len({index for _, index in first}) == 16
    assert list(sampler(epoch=0.75, batch=1, accumulation=2, ranks=4)) == first
    assert [index for _, index in sampler(epoch=1.0, batch=8)] != [index for _, index in first]
    assert {epoch for epoch, _ in sampler(epoch=1.5, batch=8)} == {1}


def test_fewer_images_than_a_step_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "19 images, but a step takes 20" in error_of(capsys, lambda: sampler(epoch=0, batch=20))


def test_a_published_dataset_is_read_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_fashion_mnist(tmp_path)
    data = Images("fashion_mnist", SIZE, folder=str(tmp_path))
    assert [rows["label"] for rows in data.load()] == [labels.tolist() for _, labels in written.values()]
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    message = error_of(capsys, data.load)
    assert "error: data: " in message
    assert "t10k-labels-idx1-ubyte" in message
    with pytest.raises(ValueError, match="folder: got path 'digits'"):
        Images("digits", SIZE, folder=str(tmp_path))
