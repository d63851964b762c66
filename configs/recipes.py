"""The table of recipes, and the DeepSpeed config of each. `python configs/make.py` writes them down.

What is the paper's (arXiv 2507.09029, abstract of version 5): pre-training of LLaMA, the largest with 1B parameters, on
FineWeb; both regimes; both strategies; comparisons at equal FLOPs. The other two sizes, eight workers and the four
coverages were given to this project as the paper's and the thesis's; not checked against the full text. Everything else
(shapes, batch, sequence length, optimizer, schedule, number of tokens, whole ends) is our own choice, and is published
nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sdp_deepspeed.config import KEY, MODES, Mode

NUM_WORKERS = 8
NUM_HOLDERS = (3, 4, 5, 6)  # C = 3/8, 1/2, 5/8, 3/4
TOKENS_PER_PARAMETER = 20  # Hoffmann et al., "Training Compute-Optimal Large Language Models", arXiv 2203.15556
BATCH_SIZE = 256  # blocks of all workers in an optimizer step


@dataclass(frozen=True)
class Size:
    """What differs between the models, besides their shape (`configs/models/<name>.json`).

    Args:
        name: of the model file.
        micro_batch: blocks that a GPU takes at a time.
        learning_rate: at its peak.
        num_warmup_steps: until then.
    """

    name: str
    micro_batch: int
    learning_rate: float
    num_warmup_steps: int


SIZES = (Size("134M", 16, 1e-3, 500), Size("500M", 8, 6e-4, 1000), Size("1B", 4, 4e-4, 2000))


@dataclass(frozen=True)
class Recipe:
    """One DeepSpeed config.

    Args:
        size: of the model.
        mode: regime and strategy; None for the plain ZeRO twin.
        num_holders: p of the 8 subnetworks hold each unit.
        whole_ends: so many layers at each end are in all subnetworks.
    """

    size: Size
    mode: Mode | None = None
    num_holders: int = NUM_WORKERS
    whole_ends: int = 0

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        if self.mode is None:
            return f"{self.size.name}-zero1"
        ends = "-whole-ends" if self.whole_ends else ""
        return f"{self.size.name}-{self.mode.regime}-{self.mode.strategy}-{self.num_holders}of{NUM_WORKERS}{ends}"

    @property
    def coverage(self) -> float:
        """C = p / k, of the layers between whole ends; 1 for plain ZeRO."""
        return self.num_holders / NUM_WORKERS

    def config(self) -> dict[str, Any]:
        """What DeepSpeed reads. The number of micro-steps follows from batch, micro-batch and ranks."""
        size = self.size
        config: dict[str, Any] = {
            "train_batch_size": BATCH_SIZE,
            "train_micro_batch_size_per_gpu": size.micro_batch,
            "gradient_clipping": 1.0,
            "steps_per_print": 100,
            "bf16": {"enabled": True},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": size.learning_rate,
                    "betas": [0.9, 0.95],
                    "weight_decay": 0.1,
                    "torch_adam": True,
                    "fused": True,
                },
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": "auto",
                    "warmup_num_steps": size.num_warmup_steps,
                    "warmup_type": "linear",
                    "cos_min_ratio": 0.1,
                },
            },
            "zero_optimization": {"stage": 1},
        }
        if self.mode is not None:
            ends = {"coverage": self.coverage, "whole_ends": self.whole_ends}
            coverage: Any = [ends] if self.whole_ends else self.coverage
            config[KEY] = {"regime": self.mode.regime, "strategy": self.mode.strategy, "coverage": coverage}
        return config


def recipes() -> Iterator[Recipe]:
    """All, each size's plain twin first, then the one to begin with: the best of `benchmarks/learning_study.py`."""
    for size in SIZES:
        yield Recipe(size)
        yield Recipe(size, Mode("forward", "block"), 2, whole_ends=1)
        for mode in MODES:
            for num_holders in NUM_HOLDERS:
                yield Recipe(size, mode, num_holders)
