"""The switch to the dense model in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.fsdp.sharded_model import ShardedModel
from sdp_deepspeed.masking.check import is_checkpointed


def run_dense_in_evaluation(sharded: ShardedModel) -> None:
    """Make forward passes in evaluation mode without gradients those of the dense model."""
    model = sharded.module

    def before(*_: Any) -> None:
        if not model.training and not torch.is_grad_enabled():
            sharded.begin_evaluation("an evaluation")
            return
        if torch.is_grad_enabled() and not model.training:
            sharded.warn()
        sharded.has_trained = True

    def after(*_: Any) -> None:
        """FSDP2 keeps the root gathered for backward. Without backward, an optimizer, clipping or the next forward pass
        would use the gathered copies as weights."""
        if not torch.is_grad_enabled():
            sharded.reshard()

    for module, copied in sharded.dense.runnable:
        vars(module)["forward"] = _or_dense(sharded, module, copied)
    model.register_forward_pre_hook(torch.compiler.disable(before), prepend=True)
    model.register_forward_hook(torch.compiler.disable(after))


def _or_dense(sharded: ShardedModel, module: nn.Module, copied: nn.Module) -> Callable[..., Any]:
    """Forward of a module, or in evaluation mode without gradients that of `copied`, the same in the dense model."""
    subnetwork = module.forward

    @torch.compiler.disable
    def is_dense() -> bool:
        if module.training and not sharded.has_warned and not is_checkpointed():
            sharded.warn()
        return not module.training and not is_checkpointed()

    @torch.compiler.disable
    def dense(*args: Any, **kwargs: Any) -> Any:
        if module is not sharded.module:  # the model is in a pass in training mode, which goes on
            sharded.begin_evaluation("an evaluation")
            sharded.has_trained = True
        return sharded.dense.run(copied, *args, **kwargs)

    @wraps(subnetwork)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return subnetwork(*args, **kwargs) if torch.is_grad_enabled() or not is_dense() else dense(*args, **kwargs)

    return forward
