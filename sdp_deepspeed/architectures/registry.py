"""Registry of described layer classes, by qualified name, so that describing imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.layer_code import check_layer_code, code_of
from sdp_deepspeed.messages import listed


@dataclass(frozen=True)
class _Description:
    """Description of a class.

    Args:
        code: methods of the class at that time; None if it was described by name.
    """

    branches: tuple[Branch, ...]
    code: Mapping[str, Any] | None = None


class UnknownForm(ValueError):
    """A layer of a described class, of a form that is not described."""


_DESCRIPTIONS: dict[str, _Description] = {}


def register(layer_class: type | str, *branches: Branch) -> None:
    """Describe the residual branches of a layer class. A second call for the same class replaces the first.

    The description applies to the current code of the class, and to subclasses that run the same code.

    Args:
        layer_class: the class, or its qualified name "package.module.Class".
        branches: residual branches in forward order.

    Raises:
        ValueError: no branches, or branches with the same name and conditions.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified(layer_class)
    if not branches or len({(branch.name, branch.when) for branch in branches}) < len(branches):
        raise ValueError(
            f"{name}: got branches {[b.name for b in branches]}, expected one or more with different names"
        )
    _DESCRIPTIONS[name] = _Description(branches, None if isinstance(layer_class, str) else code_of(layer_class))


def described_as(layer_class: type) -> str:
    """Qualified name of a class or its nearest base class that is described; empty if there is none."""
    base = _described_base(layer_class)
    return "" if base is None else _qualified(base)


def branches_of(layer_class: type) -> tuple[Branch, ...] | None:
    """Branches of a class or its nearest described base class; None if there is none."""
    base = _described_base(layer_class)
    return None if base is None else _DESCRIPTIONS[_qualified(base)].branches


def branches_in(name: str, layer: nn.Module) -> tuple[Branch, ...]:
    """Branches of a module; empty if it is not a described layer.

    Raises:
        UnknownForm: its form is not described.
        ValueError: the layer runs other code than the described class, or lacks an attribute that decides the form.
    """
    base = _described_base(type(layer))
    if base is None:
        return ()
    description = _DESCRIPTIONS[_qualified(base)]
    check_layer_code(name, layer, base, description.code)
    try:
        branches = tuple(branch for branch in description.branches if branch.is_in(layer))
        for branch in branches:
            branch.is_bypassed(layer)
    except AttributeError as problem:
        raise ValueError(
            f"{name!r}: the description of {type(layer).__name__} uses an attribute (`when`, `bypassed`) that this "
            f"layer lacks: {problem}.\n\n{how_to_describe(layer)}"
        ) from None
    names = [branch.name for branch in branches]
    if not branches:
        forms = (branch.when for branch in description.branches)
        known = dict.fromkeys(", ".join(f"{path} = {_describe(value)}" for path, value in form) for form in forms)
        raise UnknownForm(
            f"{name!r}: this form of {type(layer).__name__} is not described; known are "
            f"{listed(known, separator='; ')}.\n\n{how_to_describe(layer)}"
        )
    if len({*names}) < len(names):
        raise ValueError(
            f"{name!r}: the branches {names} of {type(layer).__name__} apply, expected different names; correct `when`"
        )
    return branches


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


def _describe(value: Any) -> str:
    return f"a {value.__name__}" if isinstance(value, type) else repr(value)


def _described_base(layer_class: type) -> type | None:
    return next((base for base in layer_class.__mro__ if _qualified(base) in _DESCRIPTIONS), None)


def _qualified(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
