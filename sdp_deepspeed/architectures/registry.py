"""Registry of described layer classes, by qualified name, so that describing imports nothing."""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch

_DESCRIPTIONS: dict[str, tuple[Branch, ...]] = {}


def register(layer_class: type | str, *branches: Branch) -> None:
    """Describe the residual branches of a layer class whose forward pass cannot be traced. A second call for the same
    class replaces the first.

    The description is taken as it is (see `check_description`), in place of what could be derived, for all layers of
    this class, and of subclasses that inherit its `forward`. A model with a described layer has the described branches
    alone.

    Args:
        layer_class: the class, or its qualified name "package.module.Class".
        branches: residual branches in forward order.

    Raises:
        ValueError: no branches, or branches with the same name.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified(layer_class)
    if not branches or len({branch.name for branch in branches}) < len(branches):
        raise ValueError(
            f"{name}: got branches {[b.name for b in branches]}, expected one or more with different names"
        )
    _DESCRIPTIONS[name] = branches


def branches_of(layer_class: type) -> tuple[Branch, ...]:
    """Branches of a class, or of its nearest described base class whose `forward` it inherits; empty if there is
    none."""
    for base in layer_class.__mro__:
        described = _DESCRIPTIONS.get(_qualified(base), ())
        if described and getattr(base, "forward", None) is getattr(layer_class, "forward", None):
            return described
    return ()


def how_to_describe(layer: nn.Module) -> str:
    """Instructions to describe the class of a layer, with names of its submodules."""
    children = ", ".join(name for name, child in layer.named_children() if any(True for _ in child.parameters()))
    return (
        "If each branch is x + after(body(norm(x))), describe it before deepspeed.initialize or fully_shard, with "
        f"names of its submodules ({children}) for NORM, BODY and AFTER; leave out `after` if at most dropout runs "
        "between body and addition; num_outputs is n if BODY returns a tuple of n:\n"
        "from sdp_deepspeed.architectures import Branch, register\n"
        f'register("{_qualified(type(layer))}",\n'
        '         Branch("attention", norm="NORM", body="BODY", after=("AFTER",), num_outputs=1),\n'
        '         Branch("mlp", norm="NORM", body="BODY", after=("AFTER",), num_outputs=1))\n'
        "Then test it: sdp_deepspeed.check_description(model, batch) (see docs/guide.md)"
    )


def _qualified(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
