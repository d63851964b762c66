"""Which of torch's optimizers a DeepSpeed config means, as DeepSpeed itself decides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from sdp_deepspeed.training.fsdp_optimizer import OptimizerChoice


def built(section: dict[str, Any]) -> torch.optim.Optimizer:
    return OptimizerChoice.of(section).build([{"params": [torch.nn.Parameter(torch.ones(2))]}])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adam"])
@pytest.mark.parametrize("given", [{}, {"adam_w_mode": False}, {"weight_decay": 0.2, "betas": [0.5, 0.6]}])
def test_adam_is_that_of_deepspeed(kind: str, given: dict[str, Any]) -> None:
    """Whose own code makes torch's for `torch_adam`."""
    params = {"lr": 0.1, "torch_adam": True} | given
    engine: Any = SimpleNamespace(optimizer_params=lambda: params, optimizer_name=kind.lower)
    engine.get_optimizer_configuration = lambda *options: DeepSpeedEngine.get_optimizer_configuration(engine, *options)
    expected = DeepSpeedEngine._configure_basic_optimizer(engine, [torch.nn.Parameter(torch.ones(2))])
    found = built({"type": kind, "params": params})
    assert type(found) is type(expected)
    assert found.defaults == expected.defaults


def test_without_torch_adam_weights_do_not_decay_by_themselves() -> None:
    """As in DeepSpeed's own kernels, and unlike torch's AdamW."""
    assert built({"type": "AdamW", "params": {"lr": 0.1}}).defaults["weight_decay"] == 0.0
    assert built({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}).defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "optimizer.type: there is none, expected Adam, AdamW or SGD"),
        ({"type": "Lamb", "params": {}}, "optimizer.type: got 'Lamb'"),
        ({"type": "AdamW", "params": {"weight_decy": 0.1}}, "did you mean 'weight_decay'"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, r"optimizer.params.betas: torch.optim.SGD"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction"),
        ({"type": "AdamW", "params": {"lr": -1.0}}, "torch.optim.AdamW refuses them: Invalid learning rate"),
        ({"type": "AdamW", "params": {"betas": 3}}, "torch.optim.AdamW refuses them"),
    ],
)
def test_what_torch_does_not_have_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        built(section)
