"""What a step of a plan computes, as a share of data parallelism's: counted on two images, before a run.

On tensors with values: batch norms without storage are run by their Python formulas, twenty times slower.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForImageClassification

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.estimate.forecast import cut_down
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from sdp_deepspeed.training.model import build_model

_NUM_IMAGES = 2  # counts grow with the batch; batch norm wants more than one


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
    dense = build_model(shape, seed=0, auto_class=AutoModelForImageClassification)
    plan, _ = plan_model(dense, block, num_ranks)
    tensors = dense_tensors(dense)
    of_subnetwork: dict[int, int] = {}
    for rank, subnetwork in enumerate(plan.subnetwork_of_rank):
        if subnetwork not in of_subnetwork:
            model = copy.deepcopy(dense)
            cut_down(model, plan, tensors, rank)
            of_subnetwork[subnetwork] = _flops(model, image_size)
    whole = _flops(dense, image_size)
    return sum(of_subnetwork[number] for number in plan.subnetwork_of_rank) / (whole * len(plan.subnetwork_of_rank))


def _flops(model: nn.Module, image_size: int) -> int:
    """Forward and backward."""
    model.train()
    pixels = torch.zeros(_NUM_IMAGES, 3, image_size, image_size, dtype=torch.float32, device="cpu")
    labels = torch.zeros(_NUM_IMAGES, dtype=torch.int64, device="cpu")
    with FlopCounter() as counter:
        F.cross_entropy(model(pixel_values=pixels).logits, labels).backward()
    return counter.total
