"""Which rank sees which image when; resuming; the test split once."""

from __future__ import annotations

import itertools

import pytest
import torch

from sdp_deepspeed.vision.batches import Batch, ImageBatches, TestBatches
from sdp_deepspeed.vision.config import ImageConfig
from sdp_deepspeed.vision.pixels import Pixels
from sdp_deepspeed.vision.splits import Split
from tests.helpers.image_data import dataset

IMAGES = ImageConfig(
    path="x", image_column="img", label_column="label", image_size=8, augmentation="crop_and_flip", padding=2
).filled()
PIXELS = Pixels(Split(dataset(10), "img", "label"), IMAGES)


def batches(micro_batch: int = 2, rank: int = 0, world_size: int = 1, seed: int = 0) -> ImageBatches:
    return ImageBatches(PIXELS, micro_batch=micro_batch, rank=rank, world_size=world_size, seed=seed)


def take(source: ImageBatches, count: int) -> list[Batch]:
    return list(itertools.islice(source, count))


def joined(parts: list[Batch]) -> torch.Tensor:
    return torch.cat([part["pixel_values"] for part in parts])


def test_shards_are_one_order_cut_and_mirrored_alike() -> None:
    alone = joined(take(batches(), 6))
    ranks = [take(batches(rank=rank, world_size=2), 3) for rank in range(2)]
    together = [part for step in zip(*ranks, strict=True) for part in step]
    assert torch.equal(joined(together), alone), "12 images: the second epoch begins in the last batch"
    assert torch.equal(joined(take(batches(4), 3)), alone)
    assert not torch.equal(joined(take(batches(seed=1), 6)), alone)


def test_each_epoch_has_every_image_once() -> None:
    source = batches()
    for _ in range(2):
        labels = torch.cat([batch["labels"] for batch in take(source, 5)])
        assert labels.bincount().tolist() == [4, 3, 3]
    assert source.epoch == 2


def test_a_resumed_run_goes_on_exactly() -> None:
    source = batches()
    take(source, 3)
    state = source.state_dict()
    rest = joined(take(source, 4))
    resumed = batches()
    next(resumed)  # what was made ahead does not count
    resumed.load_state_dict(state)
    assert torch.equal(joined(take(resumed, 4)), rest)
    other = batches(4)
    other.load_state_dict(state)
    assert torch.equal(joined(take(other, 2)), rest)
    other.load_state_dict(state)
    other.micro_batch = 1
    assert torch.equal(joined(take(other, 8)), rest)
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        batches(seed=1).load_state_dict(state)


def test_the_first_batches_leave_the_position() -> None:
    source = batches()
    begin = joined(list(source.first(2)))
    assert torch.equal(joined(take(source, 2)), begin)
    assert torch.equal(joined(list(source.first(2))), begin)


def test_the_first_batches_are_those_of_the_rank() -> None:
    begins = []
    for rank in range(2):
        source = batches(rank=rank, world_size=2)
        begins.append(joined(list(source.first(2))))
        assert torch.equal(joined(take(source, 2)), begins[rank])
    assert not torch.equal(*begins)


def test_an_image_is_another_crop_in_each_epoch() -> None:
    source = batches()
    epochs = [{image.numpy().tobytes() for image in joined(take(source, 5))} for _ in range(2)]
    assert [len(images) for images in epochs] == [10, 10]
    assert len(epochs[0] & epochs[1]) < 10


def test_too_few_images() -> None:
    with pytest.raises(
        ValueError, match="the training split has 10 images, one step of 4 ranks with micro-batch 3 needs 12"
    ):
        batches(3, world_size=4)


def test_the_test_split_once() -> None:
    ranks = [list(TestBatches(PIXELS, micro_batch=3, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sum(weight for rank in ranks for _, weight in rank) == 10
    labels = torch.cat([inputs["labels"] for rank in ranks for inputs, _ in rank])
    assert labels[labels >= 0].bincount().tolist() == [4, 3, 3]
    assert all((inputs["labels"] >= 0).sum() == weight for rank in ranks for inputs, weight in rank)
