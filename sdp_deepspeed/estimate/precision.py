"""Bytes per element of what a rank holds and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element.

    Args:
        weights: weights, in the training dtype.
        gradients: gradients, as they are summed over micro-steps at stages 0 and 1.
        wire: gradients on the wire (`communication_data_type`).
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
        """The precision of a training dtype.

        Args:
            wire: None sends gradients in the dtype in which they are summed.
        """
        size = 4 if dtype == "fp32" else 2
        gradients = FP32_BYTES if accumulate_in_fp32 else size
        return cls(size, gradients, size if wire is None else wire, moments)
