"""A split's images as what a model takes: in memory where they are small, else decoded when they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdp_deepspeed.data import PreparedDataError
from sdp_deepspeed.data.block_order import Samples
from sdp_deepspeed.data.shuffle import uniform
from sdp_deepspeed.messages import listed
from sdp_deepspeed.vision import augmentation
from sdp_deepspeed.vision.config import Images
from sdp_deepspeed.vision.splits import Split

# Of ImageNet's training images, as usual.
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BILINEAR = 2  # of Pillow's resampling filters
_AT_ONCE = 1024  # images that are decoded at a time
_LARGEST_IN_MEMORY = 4 * 2**30  # bytes


class Normalization:
    """Subtracts a mean and divides by a deviation, of each channel.

    Args:
        mean, std: of pixels between 0 and 1; three each.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = [float(value) for value in mean], [float(value) for value in std]

    @classmethod
    def of(cls, pixels: Tensor) -> Normalization:
        """Of these images, [N, 3, S, S] uint8; a channel without any contrast is left as it is."""
        means, squares = torch.zeros(2, 3, dtype=torch.float64, device="cpu")
        for part in pixels.split(_AT_ONCE):
            values = part.double() / 255
            means += values.sum((0, 2, 3))
            squares += (values * values).sum((0, 2, 3))
        count = pixels.numel() / 3
        mean = means / count
        std = (squares / count - mean * mean).clamp(min=0).sqrt()
        return cls(mean.tolist(), torch.where(std > 1e-6, std, 1.0).tolist())

    def __call__(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] uint8 to float32."""
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device="cpu")[:, None, None] for values in (self.mean, self.std)
        )
        return (pixels.float() / 255 - mean) / std


class Pixels:
    """One split as the model takes it.

    Args:
        split: encoded images.
        images: how they are cut and augmented.
        normalization: of the training split; None means that this is it.

    Raises:
        ValueError: images that would take too much memory.
        PreparedDataError: one cannot be decoded.
    """

    def __init__(self, split: Split, images: Images, normalization: Normalization | None = None) -> None:
        self._split, self._images = split, images
        self._decoded = None if images.decodes_on_demand else self._decode_all()
        self._workers = ThreadPoolExecutor(images.workers) if images.decodes_on_demand else None
        if normalization is None and self._decoded is None:
            normalization = Normalization(_IMAGENET_MEAN, _IMAGENET_STD)
        self.normalization = normalization or Normalization.of(self._decoded)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._split)

    @property
    def identity(self) -> str:
        return self._split.identity

    @cached_property
    def _labels(self) -> Tensor:
        return torch.from_numpy(self._split.labels)

    def labels(self, items: Samples) -> Tensor:
        """[B] int64, a copy."""
        return self._labels[torch.from_numpy(items)].clone()

    def plain(self, items: Samples) -> Tensor:
        """[B, 3, S, S] float32, without augmentation."""
        if self._decoded is not None:
            return self.normalization(self._decoded[torch.from_numpy(items)])
        return self.normalization(self._resized(items, [None] * len(items)))

    def augmented(self, items: Samples, samples: Samples, *, seed: int) -> Tensor:
        """[B, 3, S, S] float32.

        Args:
            samples: [B] positions in the run, which with `seed` decide what is drawn.
        """
        kind = self._images.augmentation
        if kind == "none":
            return self.plain(items)
        if self._decoded is None:
            draws = uniform(samples, augmentation.NUM_PART_DRAWS, seed=seed)
            return self.normalization(self._resized(items, draws.tolist()))
        draws = uniform(samples, augmentation.NUM_CROP_DRAWS, seed=seed)
        chosen = self._decoded[torch.from_numpy(items)]
        flip = kind == "crop_and_flip"
        return self.normalization(augmentation.crop(chosen, draws, padding=self._images.padding, flip=flip))

    def _decode_all(self) -> Tensor:
        size, count = self._images.image_size, len(self._split)
        if (num_bytes := 3 * size * size * count) > _LARGEST_IN_MEMORY:
            raise ValueError(
                f"--data: {count} images of {size} x {size} take {num_bytes / 2**30:.0f} GiB on each rank: set "
                'augmentation "resized_crop", which decodes them as they are taken, or a smaller image_size'
            )
        parts = []
        for first in range(0, count, _AT_ONCE):
            pictures = self._pictures(range(first, min(first + _AT_ONCE, count)))
            parts += [_tensor(p if p.size == (size, size) else p.resize((size, size), _BILINEAR)) for p in pictures]
        return torch.stack(parts)

    def _resized(self, items: Samples, draws: Sequence[Sequence[float] | None]) -> Tensor:
        """Parts of images, decoded by the workers: where draws say, or the middle; [B, 3, S, S] uint8."""
        assert self._workers is not None
        return torch.stack(list(self._workers.map(self._part, items.tolist(), draws)))

    def _part(self, item: int, draws: Sequence[float] | None) -> Tensor:
        size, (picture,) = self._images.image_size, self._pictures([item])
        if draws is None:
            box, mirrored = augmentation.middle(picture.size), False
        else:
            box, mirrored = augmentation.random_part(picture.size, draws)
        pixels = _tensor(picture.resize((size, size), _BILINEAR, box=box, reducing_gap=2.0))
        return pixels.flip(-1) if mirrored else pixels

    def _pictures(self, items: Sequence[int]) -> list[Any]:
        try:
            return self._split.images(items)
        except Exception as error:  # of any kind: those of Pillow and of pyarrow
            raise PreparedDataError(f"--data: an image among {listed(items)} cannot be decoded: {error}") from error


def _tensor(picture: Any) -> Tensor:
    """RGB to [3, S, S] uint8."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
