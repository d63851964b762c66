"""What a step of a plan computes, as a share of data parallelism's: counted without storage, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.measure.flops import FlopCounter
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from sdp_deepspeed.training.forecast import cut_down
from sdp_deepspeed.vision.shapes import NUM_IMAGES, model_without_storage, some_images


def compute_share(shape: Mapping[str, Any], config: Mapping[str, Any], *, num_ranks: int, image_size: int) -> float:
    """FLOPs of all ranks in a step with the block, by those without it.

    Args:
        shape: a Transformers config with `model_type`.
        config: DeepSpeed's, with our block.
        num_ranks: data-parallel ranks.
        image_size: S, in pixels.

    Raises:
        ValueError: a model that cannot be built, a block that is refused, or one whose share changes.
    """
    block = parse(config)
    if block is None:
        return 1.0
    if config[KEY].get("schedule") is not None:
        raise ValueError(f"--equal-flops: with {KEY}.schedule the share changes over the run: give --steps yourself")
    dense = model_without_storage(shape)
    plan, _ = plan_model(dense, block, num_ranks)
    tensors = dense_tensors(dense)
    of_subnetwork: dict[int, int] = {}
    for rank, subnetwork in enumerate(plan.subnetwork_of_rank):
        if subnetwork not in of_subnetwork:
            model = model_without_storage(shape)
            cut_down(model, plan, tensors, rank)
            of_subnetwork[subnetwork] = _flops(model, image_size)
    whole = _flops(dense, image_size)
    return sum(of_subnetwork[number] for number in plan.subnetwork_of_rank) / (whole * len(plan.subnetwork_of_rank))


def _flops(model: nn.Module, image_size: int) -> int:
    """Forward and backward."""
    model.train()
    labels = torch.empty(NUM_IMAGES, dtype=torch.long, device="meta")
    with FlopCounter() as counter:
        F.cross_entropy(model(pixel_values=some_images(image_size)).logits, labels).backward()
    return counter.total
