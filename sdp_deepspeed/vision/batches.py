"""Images to batches: which rank sees which image when, cut and mirrored how, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from sdp_deepspeed.data import PackedBatches
from sdp_deepspeed.data.block_order import Samples, ShuffledBlocks
from sdp_deepspeed.data.loader import IGNORED_LABEL
from sdp_deepspeed.vision.pixels import Pixels

Batch = dict[str, torch.Tensor]


class ImageBatches(PackedBatches):
    """Endless training batches of one data-parallel rank, in the order of `PackedBatches`; each epoch is a new
    permutation of the images. The next batch is made in the background.

    Args:
        pixels: of the training images.
        micro_batch: B, images per rank and micro-step.
        rank, world_size: of the data-parallel group.
        seed: of order and augmentation.

    Raises:
        ValueError: fewer images than ranks * micro_batch.
    """

    def __init__(self, pixels: Pixels, *, micro_batch: int, rank: int, world_size: int, seed: int) -> None:
        self._pixels, self._seed = pixels, seed
        # A block is the number of an image.
        order = ShuffledBlocks(np.arange(len(pixels))[:, None].astype(np.uint64), seed=seed, data=pixels.identity)
        self._ready: tuple[tuple[int, int], Future[Batch]] | None = None
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="images")
        super().__init__(order, micro_batch=micro_batch, rank=rank, world_size=world_size)

    def _words(self) -> tuple[str, str]:
        return "images", "give more images, or a smaller micro-batch"

    def _batch_of(self, samples: Samples) -> Batch:
        """`pixel_values`, float32 [B, 3, S, S], and `labels`, int64 [B], on the CPU."""
        ready, self._ready = self._ready, None
        batch = ready[1].result() if ready and ready[0] == _span(samples) else self._make(samples)
        following = samples + self._world_size * len(samples)
        self._ready = _span(following), self._maker.submit(self._make, following)
        return batch

    def first(self, num_batches: int) -> Iterator[Batch]:
        """The batches that this rank began the run with, or would at this micro-batch; the position stays."""
        for step in range(num_batches):
            start = (step * self._world_size + self._rank) * self._micro_batch
            yield self._make(np.arange(start, start + self._micro_batch))

    def _make(self, samples: Samples) -> Batch:
        items = self._order.blocks(samples)[:, 0].astype(np.int64)
        return {
            "pixel_values": self._pixels.augmented(items, samples, seed=self._seed),
            "labels": self._pixels.labels(items),
        }


def _span(samples: Samples) -> tuple[int, int]:
    return int(samples[0]), len(samples)


class TestBatch(NamedTuple):
    """One rank's batch and how many images of it count (the rest is padding, whose labels are ignored)."""

    inputs: Batch
    weight: int


class TestBatches:
    """All test images once, as many batches on every rank; may be iterated again and again.

    Args:
        pixels: of the test images.
        micro_batch: B, images per batch and rank.
        rank, world_size: of the data-parallel group.
    """

    __test__ = False  # pytest

    def __init__(self, pixels: Pixels, *, micro_batch: int, rank: int, world_size: int) -> None:
        self._pixels, self._micro_batch, self._rank, self._world_size = pixels, micro_batch, rank, world_size

    def __len__(self) -> int:
        """Batches per rank, the same on every rank."""
        return -(-len(self._pixels) // (self._world_size * self._micro_batch))

    def __iter__(self) -> Iterator[TestBatch]:
        num_images = len(self._pixels)
        for step in range(len(self)):
            first = (step * self._world_size + self._rank) * self._micro_batch
            positions = np.arange(first, first + self._micro_batch)
            weight = int((positions < num_images).sum())
            items = positions % num_images
            labels = self._pixels.labels(items)
            labels[weight:] = IGNORED_LABEL
            yield TestBatch({"pixel_values": self._pixels.plain(items), "labels": labels}, weight)
