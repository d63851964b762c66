"""Layer classes that are described, by qualified name, so that nothing has to be imported to describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.own_forward import check_own_forward, code_of


@dataclass(frozen=True)
class _Description:
    """What a class was described as.

    Args:
        branches: in the order in which they run.
        code: what the class ran then; None if it was described by name.
    """

    branches: tuple[Branch, ...]
    code: Mapping[str, Any] | None = None


_DESCRIPTIONS: dict[str, _Description] = {}


def register(layer_class: type | str, *branches: Branch) -> None:
    """Describe a layer class; a second description of the same class replaces the first. It holds for the code that
    the class has now, and for subclasses that run the same.

    Args:
        layer_class: the class, or its qualified name "package.module.Class".
        branches: its residual branches in the order in which they run.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified(layer_class)
    if not branches or len({branch.name for branch in branches}) < len(branches):
        raise ValueError(f"{name}: give one or more branches with different names, got {[b.name for b in branches]}")
    _DESCRIPTIONS[name] = _Description(branches, None if isinstance(layer_class, str) else code_of(layer_class))


def branches_of(layer_class: type) -> tuple[Branch, ...] | None:
    """The description of a class or of the nearest described base class, None if there is none."""
    base = _described_base(layer_class)
    return None if base is None else _DESCRIPTIONS[_qualified(base)].branches


def branches_in(name: str, layer: nn.Module) -> tuple[Branch, ...]:
    """Branches of a module, none if it is no described layer.

    Args:
        name: of the layer, for messages.

    Raises:
        ValueError: it runs other code than the class that is described.
    """
    base = _described_base(type(layer))
    if base is None:
        return ()
    description = _DESCRIPTIONS[_qualified(base)]
    check_own_forward(name, layer, base, description.code)
    return description.branches


def described() -> list[str]:
    """Names of all described layer classes, for error messages."""
    return sorted(_DESCRIPTIONS)


def _described_base(layer_class: type) -> type | None:
    return next((base for base in layer_class.__mro__ if _qualified(base) in _DESCRIPTIONS), None)


def _qualified(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
