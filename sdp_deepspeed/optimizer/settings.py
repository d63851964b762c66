"""What the host's config asks of the optimizer and of the exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdp_deepspeed.config import LearningRateRule


@dataclass(frozen=True)
class Offload:
    """Masters, moments and the step are in host memory (DeepSpeed's `offload_optimizer`).

    Args:
        pin_memory: page-locked, for faster copies from and to a GPU.
    """

    pin_memory: bool = False


@dataclass(frozen=True)
class OptimizerSettings:
    """Options that DeepSpeed's config gives to the optimizer.

    Args:
        stage: ZeRO stage, 0, 1 or 2.
        clip: largest norm of the averaged dense gradient; 0 switches clipping off.
        bucket_elements: most elements that a rank packs for gradients in one exchange (`reduce_bucket_size`); None is
            what suits the model and the number of holders.
        return_bucket_elements: the same for weights that return (`allgather_bucket_size`).
        wire_dtype: of gradients on the wire (`communication_data_type`).
        accumulate_in_fp32: keep gradients in fp32 between micro-steps (`data_types.grad_accum_dtype`).
        max_in_flight: buckets whose exchange may run while backward, packing or unpacking goes on (`overlap_comm`).
        skip_overflow: leave a step out on all ranks when any rank's gradient is not finite.
        offload: where masters and moments live, None on the device of the weights.
        needs_norm: without it, clipping and `skip_overflow` no norm is computed (`compute_grad_norm`).
        lr_by_coverage: what learning rates of units are multiplied by.
        whole_tensors: give any optimizer whole tensors, not only those that are known to need them (`allow_optimizer`).
    """

    stage: int
    clip: float
    wire_dtype: torch.dtype
    bucket_elements: int | None = None
    return_bucket_elements: int | None = None
    accumulate_in_fp32: bool = False
    max_in_flight: int = 0
    skip_overflow: bool = False
    offload: Offload | None = None
    needs_norm: bool = True
    lr_by_coverage: LearningRateRule = "none"
    whole_tensors: bool = False

    def __post_init__(self) -> None:
        assert self.stage in (0, 1, 2), f"ZeRO stage {self.stage!r} is refused at start"
