"""DeepSpeed configs for images; `python configs/make.py` writes them into configs/vision/recipes/.

What is the paper's (arXiv 2507.09029), as it was given to this project: ResNet-18, WideResNet-18 and Swin-T on
CIFAR-10, CIFAR-100, SVHN and ImageNet, blocks and channels. Batch, optimizer, schedule and augmentation are the usual
ones of the field for such models, and were not compared with its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sdp_deepspeed.config import KEY, MODES, Mode

NUM_WORKERS = 8
NUM_HOLDERS = 4  # C = 1/2


@dataclass(frozen=True)
class Family:
    """What differs between data and models.

    Args:
        name: of the files.
        batch: images of all workers in an optimizer step.
        optimizer: type and params.
        num_warmup_steps: until the learning rate's peak.
        clip: largest norm of the gradient; 0 for any, as DeepSpeed clips at 1.0 where a config says nothing.
    """

    name: str
    batch: int
    optimizer: dict[str, Any]
    num_warmup_steps: int
    clip: float = 0.0


def _sgd(weight_decay: float) -> dict[str, Any]:
    params = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay, "nesterov": True}
    return {"type": "SGD", "params": params}


FAMILIES = (
    Family("resnet", 128, _sgd(5e-4), 2000),
    Family(
        "swin",
        128,
        {
            "type": "AdamW",
            "params": {"lr": 5e-4, "weight_decay": 0.05, "torch_adam": True, "fused": True},
        },
        4000,
        clip=5.0,
    ),
    Family("imagenet", 256, _sgd(1e-4), 25000),
)


def vision_recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and config of each; plain data parallelism is any of them with --baseline."""
    for family in FAMILIES:
        for mode in MODES:
            yield f"{family.name}-{mode.regime}-{mode.strategy}-{NUM_HOLDERS}of{NUM_WORKERS}", _config(family, mode)


def _config(family: Family, mode: Mode) -> dict[str, Any]:
    return {
        "train_batch_size": family.batch,
        "train_micro_batch_size_per_gpu": family.batch // NUM_WORKERS,
        "gradient_clipping": family.clip,
        "steps_per_print": 1000000,
        "zero_allow_untested_optimizer": True,  # of SGD, without our block
        "optimizer": family.optimizer,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_num_steps": family.num_warmup_steps,
                "warmup_type": "linear",
                "cos_min_ratio": 0.0,
            },
        },
        "zero_optimization": {"stage": 1},
        KEY: {"regime": mode.regime, "strategy": mode.strategy, "coverage": NUM_HOLDERS / NUM_WORKERS},
    }
