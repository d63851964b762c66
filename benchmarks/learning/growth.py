"""Growth from the ends: the first and last layers train alone, then all layers, with zero output at first.

The idea is that of arXiv 2511.04981; the middle layers keep their initial weights until they are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.reference.virtual_workers import Reference

_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def _middle(model: Any, ends: int) -> Sequence[nn.Module]:
    layers: Sequence[nn.Module] = model.model.layers[ends : len(model.model.layers) - ends]
    return layers


@contextmanager
def ends_alone(model: nn.Module, ends: int) -> Iterator[None]:
    """Context in which a Llama has only `ends` layers at each end."""
    layers = _middle(model, ends)
    for layer in layers:
        vars(layer)["forward"] = lambda hidden_states, *_, **__: hidden_states
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@torch.no_grad()
def add_layers(model: nn.Module, reference: Reference, ends: int, initial: nn.Module) -> None:
    """Give the middle layers their initial weights, but zero output, and fresh optimizer state.

    Args:
        initial: the model as it was at first.
    """
    inside = {id(parameter) for layer in _middle(model, ends) for parameter in layer.parameters()}
    values = dict(initial.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) in inside:
            parameter.copy_(torch.zeros_like(parameter) if name.endswith(_OUTPUTS) else values[name])
            reference.masters[name].copy_(parameter)
            reference.optimizer.state.pop(reference.masters[name], None)
