"""What `torch.compile` leaves in a model: wrappers in the module tree, and methods of its own on a module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.masking.own_forward import runs_by_another_forward
from sdp_deepspeed.messages import quoted


def compile_in_place(model: nn.Module) -> nn.Module:
    """`model` without the wrappers of `torch.compile`: what they wrap is compiled in place, as by `module.compile()`.

    Names and classes are those of the model again, and what is mixed into a class later is seen by the compiler.

    Returns:
        The model itself, unless it was wrapped as a whole.
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


def check_forward(model: nn.Module, names: Iterable[str]) -> None:
    """Modules that will run in another way must run by their class, or by a function bound to them that keeps nothing.

    Raises:
        ValueError: a module has another `forward` of its own, which would go on running in the old way.
    """
    overridden = [name for name in names if runs_by_another_forward(model.get_submodule(name))]
    if overridden:
        raise ValueError(
            f"{KEY}: {quoted(overridden, limit=1)} has a forward method of its own (compiled or "
            "wrapped), which would not see what this rank lacks; compile with module.compile() or "
            "torch.compile(module) instead, or wrap it after deepspeed.initialize. A function that is bound to the "
            "module may take weights and modules from its `self` only, not keep them, and must name the class "
            "whose forward it calls (LlamaMLP.forward, not type(self).forward)"
        )


def replaced_modules(model: nn.Module, branch: LocatedBranch, *, twice: bool) -> list[str]:
    """Names of modules whose forward pass changes when a branch is cut.

    Args:
        twice: whether its bodies run in two parts.
    """
    if not twice:
        return list(branch.modules)
    return [
        f"{body}.{name}".rstrip(".") for body in branch.bodies for name, _ in model.get_submodule(body).named_modules()
    ]
