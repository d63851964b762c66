"""Wrappers around a model and its layers: names are those of the model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_COMPILED = "_orig_mod"  # child of torch.compile's wrapper
_INNER = ("_checkpoint_wrapped_module", _COMPILED)  # and of torch's checkpoint_wrapper and offload_wrapper


def compile_in_place(model: nn.Module) -> nn.Module:
    """Replace the wrappers of `torch.compile` by in-place compilation, as of `module.compile()`, so that names and
    classes are those of the original model.

    Returns:
        The model without its wrapper.
    """
    for parent in list(model.modules()):
        for name in parent._modules:
            while (child := parent._modules[name]) is not None and _is_compiled(child):
                parent._modules[name] = _unwrap(child)
    return _unwrap(model) if _is_compiled(model) else model


def _is_compiled(module: nn.Module) -> bool:
    return _COMPILED in module._modules and hasattr(module, "dynamo_ctx")


def _unwrap(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules[_COMPILED]
    assert inner is not None
    inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner


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
