"""Wrappers around layers that were there before `fully_shard`: its names are those of the model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_INNER = "_checkpoint_wrapped_module"  # of torch's checkpoint_wrapper and offload_wrapper


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Context in which torch's checkpoint_wrapper is off, so that modules have the names that they would have without
    it, in plans and checkpoints too; afterwards it is on again, as if it had been put on later.

    Raises:
        ValueError: the model itself is wrapped.
    """
    if _is_wrapper(model):
        raise ValueError("fully_shard: the model itself is wrapped by checkpoint_wrapper; wrap its layers instead")
    off: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()) if not _is_wrapper(parent) else ():
            if child is not None and _is_wrapper(child):
                innermost = _innermost(child)
                off.append((parent, name, child, innermost))
                parent._modules[name] = innermost._modules[_INNER]
    try:
        yield
    finally:
        for parent, name, outermost, innermost in off:
            innermost._modules[_INNER] = parent._modules[name]  # what a branch that is cut has become
            parent._modules[name] = outermost


def _is_wrapper(module: nn.Module) -> bool:
    return _INNER in module._modules


def _innermost(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules[_INNER]
    return _innermost(inner) if inner is not None and _is_wrapper(inner) else wrapper
