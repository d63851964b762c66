"""Image classifiers side by side: PyTorch's DDP, stock ZeRO-1, and the method with ZeRO-1, with SGD
at a rate that changes little, and gradients clipped as everywhere here."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageClassification

import sdp_deepspeed.architectures.small_image_resnet  # noqa: F401  registers the model type
from benchmarks.common.contestants import Batch, Contestant
from benchmarks.common.device import device
from benchmarks.common.models import Shape
from benchmarks.systems.plain import CLIPPING, PlainEngine, in_ddp
from benchmarks.systems.subjects import BASELINE, Subject, possible
from sdp_deepspeed.config import MODES

RESNET_18: Shape = {"model_type": "sdp_small_image_resnet", "stage_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
NUM_CLASSES = 10
STAGE = 1
COVERAGES = {"forward": (0.5, 0.25), "backward": (0.5,)}  # of each regime's modes
SGD: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}


@dataclass(frozen=True)
class ImageSubject(Subject):
    """DDP, or DeepSpeed with or without the method, on a classifier of Transformers; fp32."""

    def dense_model(self, shape: Shape) -> torch.nn.Module:
        return classifier(shape)

    def build(self, shape: Shape, precision: str, *, micro_batch: int, bucket: int) -> Any:
        model = classifier(shape)
        if self.contestant is None:
            model = model.to(device())
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            return PlainEngine(model, in_ddp(model, bucket=bucket), optimizer, stage=0, autocast=nullcontext())
        config = self.contestant.config(precision, bucket=bucket) | {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": CLIPPING,
            "zero_allow_untested_optimizer": True,  # ZeRO's word for SGD
            "optimizer": {"type": "SGD", "params": SGD},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine


def classifier(shape: Shape) -> torch.nn.Module:
    """With fresh weights, the same on all ranks; as it trains.

    Args:
        shape: a Transformers config with `model_type`, whose images may have any size.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, num_labels=NUM_CLASSES)
    return AutoModelForImageClassification.from_config(config).train()


def image_subjects(num_ranks: int) -> list[Subject]:
    """The baseline first, then ZeRO-1, then the method with the coverages that so many ranks can have."""
    cells = [(mode, coverage) for mode in MODES for coverage in possible(COVERAGES[mode.regime], num_ranks)]
    ours = [ImageSubject("DeepSpeed", Contestant(STAGE, mode, coverage)) for mode, coverage in cells]
    return [ImageSubject(BASELINE), ImageSubject("DeepSpeed", Contestant(STAGE)), *ours]


def random_images(num_images: int, size: int) -> Batch:
    """Normal noise and classes at random, each rank its own, the same in every run [images, 3, size, size]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    pixels = torch.randn(num_images, 3, size, size, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (num_images,), generator=generator)
    return {"pixel_values": pixels.to(device()), "labels": labels.to(device())}
