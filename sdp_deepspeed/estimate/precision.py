"""Bytes per element of what a rank holds and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4
# fp32 moments of each element, by the optimizer's name in small letters; of what is not here 2.
_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1, "fusedlion": 1, "deepspeedcpulion": 1, "deepspeedcpuadagrad": 1}


def num_moments(optimizer: str, *, has_momentum: bool = False) -> int:
    """fp32 moments per element.

    Args:
        optimizer: name of its class, or DeepSpeed's.
        has_momentum: of SGD.
    """
    name = optimizer.lower()
    return 1 if name == "sgd" and has_momentum else _MOMENTS.get(name, 2)


@dataclass(frozen=True)
class Precision:
    """Bytes per element.

    Args:
        weights: of the training dtype; the returning half of the exchange sends this.
        gradients: of gradients that wait for the step: local ones at stages 0 and 1, owned averages at stage 2.
        wire: of gradients on the wire (`communication_data_type`).
        num_moments: fp32 moments per element: Adam 2; Lion, Adagrad, SGD with momentum 1; SGD 0.
    """

    weights: int
    gradients: int
    wire: int
    num_moments: int = 2

    @classmethod
    def of(
        cls,
        dtype: Literal["fp32", "bf16", "fp16"],
        *,
        accumulate_in_fp32: bool = False,
        wire: int | None = None,
        moments: int = 2,
    ) -> Precision:
        """The precision of a dtype; `wire` None means that gradients travel in the dtype of the weights."""
        size = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
        return cls(size, FP32_BYTES if accumulate_in_fp32 else size, size if wire is None else wire, moments)

    def optimizer(self, *, offload: bool = False) -> int:
        """Optimizer state per stepped element: moments, and the fp32 master where one is kept.

        fp32 weights are stepped in place, unless the optimizer steps in host memory.
        """
        return FP32_BYTES * (self.num_moments + (offload or self.weights != FP32_BYTES))
