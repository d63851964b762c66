"""Classification of images, as a task of the training program."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoModelForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from sdp_deepspeed.batch_norm import reestimate_batch_norm
from sdp_deepspeed.data.loader import IGNORED_LABEL
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.training import engines
from sdp_deepspeed.training.evaluate import to_device
from sdp_deepspeed.training.model import build_model
from sdp_deepspeed.vision.batches import Batch, ImageBatches, TestBatches
from sdp_deepspeed.vision.options import VisionOptions
from sdp_deepspeed.vision.pixels import Normalization, Pixels
from sdp_deepspeed.vision.shapes import full_shape, try_model
from sdp_deepspeed.architectures.small_image_resnet import MODEL_TYPE


@dataclass(frozen=True)
class ImageData:
    """
    Args:
        train: endless batches of this rank.
        validation: the test split's batches of this rank.
        normalization: of both.
    """

    train: ImageBatches
    validation: TestBatches
    normalization: Normalization


class VisionTask:
    """An image classifier of Transformers; its dense model is measured by its top-1 accuracy on the test split."""

    items = "images"

    def __init__(self, options: VisionOptions) -> None:
        self._options = options
        self._estimated_after: int | None = None  # steps

    def check(self) -> None:
        """ValueError for a model that these images do not fit."""
        self._images, self._splits = self._options.opened()
        self._shape = full_shape(self._options.model, self._splits.names, self._images.image_size)
        try_model(self._shape, self._images.image_size)

    def build_model(self, *, deferred: bool) -> nn.Module:
        options = self._options
        return build_model(
            self._shape,
            seed=options.seed,
            gradient_checkpointing=options.gradient_checkpointing,
            deferred=deferred,
            auto_class=AutoModelForImageClassification,
        )

    def open_data(self, engine: Any, world: Gatherer) -> ImageData:
        """This rank's share; tensor-parallel ranks have the same one."""
        return run_on_all_ranks(world, lambda: self._open(engine))

    def _open(self, engine: Any) -> ImageData:
        group = engine.seq_data_parallel_group
        micro_batch, rank, world_size = (
            engine.train_micro_batch_size_per_gpu(),
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        pixels = Pixels(self._splits.train, self._images)
        test = Pixels(self._splits.test, self._images, pixels.normalization)
        return ImageData(
            ImageBatches(pixels, micro_batch=micro_batch, rank=rank, world_size=world_size, seed=self._images.seed),
            TestBatches(test, micro_batch=micro_batch, rank=rank, world_size=world_size),
            pixels.normalization,
        )

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Cross entropy with smoothed labels."""
        return F.cross_entropy(_logits(engine, batch), batch["labels"], label_smoothing=self._options.label_smoothing)

    @torch.no_grad()
    def evaluate(self, engine: Any, data: Any) -> dict[str, float]:
        """Of the dense model, on all test images once; a collective of all ranks.

        Returns:
            `dense_validation_loss` (nats, without smoothing), `dense_top1` (share), `num_images`, `seconds`.
        """
        start = time.perf_counter()
        self._reestimate_batch_norms(engine, data)
        sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
        engine.eval()
        for inputs, weight in data.validation:
            batch = to_device(inputs, engine.device)
            logits, labels = _logits(engine, batch), batch["labels"]
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
            right = (logits.argmax(1) == labels).sum()
            sums += torch.stack([loss.double(), right.double(), loss.new_tensor(weight, dtype=torch.float64)])
        engine.train()
        dist.all_reduce(sums, group=engine.seq_data_parallel_group)  # tensor-parallel ranks have the same batches
        loss_sum, num_right, num_images = sums.tolist()
        return {
            "dense_validation_loss": loss_sum / num_images,
            "dense_top1": num_right / num_images,
            "num_images": int(num_images),
            "seconds": time.perf_counter() - start,
        }

    def before_export(self, engine: Any, data: Any) -> None:
        self._reestimate_batch_norms(engine, data)

    def _reestimate_batch_norms(self, engine: Any, data: Any) -> None:
        """Where subnetworks are trained, running statistics are of those, and fit no evaluation of the dense model."""
        if engine.global_steps == self._estimated_after or not engines.trains_subnetwork(engine):
            return
        if any(isinstance(module, _BatchNorm) for module in engine.module.modules()):
            num_batches = self._options.batch_norm_batches
            batches = ({"pixel_values": _pixels(engine, batch)} for batch in data.train.first(num_batches))
            reestimate_batch_norm(engine, batches, num_batches=num_batches)
            self._estimated_after = engine.global_steps

    def words(self, evaluation: dict[str, float]) -> str:
        loss, top1 = evaluation["dense_validation_loss"], evaluation["dense_top1"]
        return f"dense validation loss {loss:.4f}, dense top-1 {top1:.2%}"

    def describe(self, data: Any) -> str:
        size = self._images.image_size
        return f"{data.train.num_blocks} training images of {size} x {size}, {len(self._splits.test)} for the test"

    def preprocessor(self, data: Any) -> ViTImageProcessorPil:
        """Resizes and normalizes as the test images were."""
        size, normalization = self._images.image_size, data.normalization
        return ViTImageProcessorPil(
            do_convert_rgb=True,
            size={"height": size, "width": size},
            image_mean=normalization.mean,
            image_std=normalization.std,
        )

    def exported(self, folder: str) -> str | None:
        how = f'AutoModelForImageClassification.from_pretrained("{folder}")'
        if self._shape["model_type"] == MODEL_TYPE:
            return f"exported: {how} after `import sdp_deepspeed.vision`, which brings the model type {MODEL_TYPE!r}"
        return f"exported: {how} loads it, without this package"


def _logits(engine: Any, batch: Batch) -> torch.Tensor:
    """[B, classes], float32."""
    logits: torch.Tensor = engine(pixel_values=_pixels(engine, batch)).logits
    return logits.float()


def _pixels(engine: Any, batch: Batch) -> torch.Tensor:
    """[B, 3, S, S] as the engine takes them."""
    return batch["pixel_values"].to(engine.device, next(engine.module.parameters()).dtype)
