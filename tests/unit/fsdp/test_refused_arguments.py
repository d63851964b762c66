"""What `fully_shard` refuses, by name and with a reason, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.config import parse_block
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.refused_arguments import check_call, check_tensors
from sdp_deepspeed.planner import plan_model
from tests.helpers.models import llama

HALF = {"coverage": 0.5}


def test_a_model_or_option_that_is_not_possible() -> None:
    check_call(llama(1), None, HALF, ShardOptions(reshard_after_forward=False))
    options: Any = 2
    with pytest.raises(ValueError, match="reshard_after_forward"):
        check_call(llama(1), None, HALF, ShardOptions(options))
    model = llama(1)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="scale"):
        check_call(model, None, HALF, ShardOptions())


def test_parameters_of_units_cannot_be_ignored() -> None:
    """Nor those of units that every rank holds."""
    model = llama(2)
    block = HALF | {"strategy": {"mlp": "neuron"}}
    plan, _ = plan_model(model, parse_block(block, "fully_shard"), 2)
    whole, _ = plan_model(model, parse_block(block | {"coverage": 1.0}, "fully_shard"), 2)
    shared = model.get_parameter("model.norm.weight")
    cut = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    check_tensors(model, plan, {shared})
    for each in (plan, whole):
        with pytest.raises(ValueError, match=r"ignored_params: gradients of 'model.layers.1.mlp.down_proj"):
            check_tensors(model, each, {shared, cut})
