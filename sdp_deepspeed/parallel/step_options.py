"""Options of the sharded optimizer, from the host's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class StepOptions:
    """How gradients are reduced and weights are stepped. Equal on all ranks.

    Args:
        stage: whether gradients are averaged in the step (1) or in each backward pass (2).
        clip: maximum gradient norm; 0 does not clip.
        clips_updates: whether to clip the updates of DeepSpeed's Muon, not its gradients (muon.py).
        bucket_size: see `plan_buckets`.
        overlap: whether stage 1 reduces complete buckets during the last backward pass, as stage 2 always does, and on
            a GPU on a separate stream.
        gradient_dtype: dtype in which gradients of micro-steps are accumulated. None: that of the weights.
        wire_dtype: communication dtype. None: the accumulation dtype.
        offload: whether shards, gradients and optimizer state are in host memory (CPU offload).
        pin_memory: whether to pin that memory, if weights are on a GPU.
    """

    stage: Literal[1, 2]
    clip: float
    clips_updates: bool
    bucket_size: int | None
    overlap: bool
    gradient_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    offload: bool
    pin_memory: bool
