"""The error for models without a layer that is described or can be derived."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from torch import nn

from sdp_deepspeed.architectures.derivation import Derivation
from sdp_deepspeed.architectures.registry import how_to_describe


def refuse_unknown_model(model: nn.Module, derivation: Derivation) -> NoReturn:
    """Raise ValueError for a model of which no branch is described or was derived: why, and what to do."""
    name = type(model).__name__
    if derivation.problem:
        raise ValueError(
            f"{name}: its forward pass could not be traced ({derivation.problem}). Give an example of inputs before "
            "deepspeed.initialize, fully_shard or join:\nsdp_deepspeed.trace(model, *args, **kwargs)"
        )
    layer, reason = next(iter(derivation.reasons.items()), ("the model", "no repeated module adds to its input"))
    known = repeated_layer(model)
    how = f"\n\n{how_to_describe(known)}" if known is not None else ""
    raise ValueError(f"{name} has no residual branch that can be left out; {layer}: {reason}.{how}")


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
