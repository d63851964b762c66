"""Wrappers around layers, applied before or after `fully_shard`: names are those of the model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_INNER = ("_checkpoint_wrapped_module", "_orig_mod")  # of torch's checkpoint_wrapper and offload_wrapper; torch.compile


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[list[str]]:
    """Context in which wrappers inside a model are removed, so that plans and checkpoints have names without them. The
    model must not run inside.

    Yields:
        Names of the wrapped modules.
    """
    off: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()) if not is_wrapper(parent) else ():
            if child is not None and is_wrapper(child):
                innermost = _innermost(child)
                off.append((parent, name, child, innermost))
                parent._modules[name] = _inside(innermost)
    inside = {id(_inside(innermost)) for _, _, _, innermost in off}
    try:
        yield [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in inside]
    finally:
        for parent, name, outermost, innermost in off:
            if (now := parent._modules.get(name)) is not None:  # a split branch has been replaced
                innermost._modules[_name(innermost)] = now
                parent._modules[name] = outermost


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper around another module."""
    return any(name in module._modules for name in _INNER)


def _innermost(wrapper: nn.Module) -> nn.Module:
    inner = _inside(wrapper)
    return _innermost(inner) if is_wrapper(inner) else wrapper


def _inside(wrapper: nn.Module) -> nn.Module:
    return wrapper.get_submodule(_name(wrapper))


def _name(wrapper: nn.Module) -> str:
    return next(name for name in _INNER if name in wrapper._modules)
