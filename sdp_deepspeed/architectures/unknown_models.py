"""The error for models without a described layer."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from torch import nn

from sdp_deepspeed.architectures.registry import how_to_describe


def refuse_unknown_model(model: nn.Module) -> NoReturn:
    """Raise ValueError for a model without a described layer: how to describe it.

    The layer is assumed to be the repeated module with most of the parameters.
    """
    unknown = f"{type(model).__name__} has no layer with known residual branches"
    layer = repeated_layer(model)
    if layer is None:
        raise ValueError(f"{unknown}. Describe yours with sdp_deepspeed.architectures.register (docs/guide.md)")
    raise ValueError(f"{unknown}; it repeats {type(layer).__name__}.\n\n{how_to_describe(layer)}")


def repeated_layer(model: nn.Module) -> nn.Module | None:
    """First module of the repeated class with the most parameters; None if no class is repeated."""
    sizes: Counter[type] = Counter()
    first: dict[type, nn.Module] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for child in container:
                if any(True for _ in child.children()):
                    first.setdefault(type(child), child)
                    sizes[type(child)] += sum(parameter.numel() for parameter in child.parameters())
    return first[max(sizes, key=lambda kind: sizes[kind])] if sizes else None
