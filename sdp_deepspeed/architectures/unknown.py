"""What a user reads whose model has no layer that is described."""

from __future__ import annotations

from collections import Counter

from torch import nn

from sdp_deepspeed.architectures.registry import described, how_to_describe


def refusal_of(model: nn.Module) -> str:
    """The message for a model without a described layer: the lines that describe its layer, and what is known.

    Its layers are taken to be the modules that the model repeats, with most of its parameters.
    """
    families = dict.fromkeys(name.rpartition(".")[2] for name in described())
    unknown, known = f"{type(model).__name__} has no layer whose residual branches are known", ", ".join(families)
    layer = repeated_layer(model)
    if layer is None:
        way = "Describe yours with sdp_deepspeed.architectures.register (docs/guide.md)"
        return f"{unknown}. {way}. Known are {known}"
    return f"{unknown}; the one that it repeats is {type(layer).__name__}. {how_to_describe(layer)}\nKnown are {known}"


def repeated_layer(model: nn.Module) -> nn.Module | None:
    """The first module of the class that a list of the model repeats, with most parameters; None without such."""
    sizes: Counter[type] = Counter()
    first: dict[type, nn.Module] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for child in container:
                if any(True for _ in child.children()):
                    first.setdefault(type(child), child)
                    sizes[type(child)] += sum(parameter.numel() for parameter in child.parameters())
    return first[max(sizes, key=lambda kind: sizes[kind])] if sizes else None
