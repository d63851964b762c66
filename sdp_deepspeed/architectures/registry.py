"""Layer classes that are described, by qualified name, so that nothing has to be imported to describe it."""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch

_BRANCHES: dict[str, tuple[Branch, ...]] = {}


def register(layer_class: type | str, *branches: Branch) -> None:
    """Describe a layer class; a second description of the same class replaces the first.

    Args:
        layer_class: the class, or its qualified name "package.module.Class".
        branches: its residual branches in the order in which they run.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified(layer_class)
    if not branches or len({branch.name for branch in branches}) < len(branches):
        raise ValueError(f"{name}: give one or more branches with different names, got {[b.name for b in branches]}")
    _BRANCHES[name] = branches


def branches_of(layer_class: type) -> tuple[Branch, ...] | None:
    """The description of a class or of the nearest described base class, None if there is none."""
    for base in layer_class.__mro__:
        if (name := _qualified(base)) in _BRANCHES:
            return _BRANCHES[name]
    return None


def described() -> list[str]:
    """Names of all described layer classes, for error messages."""
    return sorted(_BRANCHES)


def _qualified(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
