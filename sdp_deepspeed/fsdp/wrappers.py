"""Wrappers around layers, applied before or after `fully_shard`: names are those of the model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_INNER = ("_checkpoint_wrapped_module", "_orig_mod")  # of torch's checkpoint_wrapper and offload_wrapper; torch.compile


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Context in which wrappers inside a model are removed, so that plans and checkpoints have names without them. The
    model must not run inside."""
    off = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and is_wrapper(child) and not is_wrapper(parent)
    ]
    for parent, name, wrapper in off:
        parent._modules[name] = _inside(wrapper)
    try:
        yield
    finally:
        for parent, name, wrapper in off:
            parent._modules[name] = wrapper


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper around another module."""
    return any(name in module._modules for name in _INNER)


def _inside(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    name = next((name for name in _INNER if name in module._modules), None)
    return module if name is None else _inside(module.get_submodule(name))
