"""Wrappers are off while a model is sharded, and on again afterwards."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from sdp_deepspeed.masking.wrappers import without_wrappers


def test_names_are_those_without_wrappers() -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    model = nn.Sequential(offload_wrapper(checkpoint_wrapper(inner)), nn.Linear(2, 2))
    outer, names = model[0], [name for name, _ in model.named_modules()]
    with without_wrappers(model):
        assert [name for name, _ in model.named_modules()] == ["", "0", "0.0", "0.1", "1"]
        assert model[0] is inner
    assert model[0] is outer
    assert [name for name, _ in model.named_modules()] == names
