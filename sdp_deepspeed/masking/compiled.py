"""Remove the wrappers of `torch.compile` from the module tree."""

from __future__ import annotations

from torch import nn


def compile_in_place(model: nn.Module) -> nn.Module:
    """Replace the wrappers of `torch.compile` by in-place compilation, as of `module.compile()`, so that names and
    classes are those of the original model.

    Returns:
        The model without its wrapper.
    """
    for parent in list(model.modules()):
        for name in parent._modules:
            while (child := parent._modules[name]) is not None and _is_wrapper(child):
                parent._modules[name] = _unwrap(child)
    return _unwrap(model) if _is_wrapper(model) else model


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def _unwrap(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules["_orig_mod"]
    assert inner is not None
    inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner
