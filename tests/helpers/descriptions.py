"""What the engine checks of descriptions before it cuts, without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.masking.description_check import check_descriptions
from sdp_deepspeed.plan.planner import plan_model


def check(model: nn.Module, strategy: Any = "block", **block: Any) -> list[str]:
    """What the engine checks before it cuts."""
    config = parse({KEY: {"holders": 1, "strategy": strategy} | block})
    assert config is not None
    plan, _ = plan_model(model, config, 2)
    return check_descriptions(model, locate_branches(model), plan, torch.device("cpu"))
