"""Layer classes that are described, by qualified name, so that nothing has to be imported to describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import Branch, Form
from sdp_deepspeed.architectures.own_forward import check_own_forward, code_of
from sdp_deepspeed.messages import listed


@dataclass(frozen=True)
class _Description:
    """What a class was described as.

    Args:
        forms: its branches, by the forms that its config gives it; a class without such has one.
        code: what the class ran then; None if it was described by name.
    """

    forms: tuple[Form, ...]
    code: Mapping[str, Any] | None = None


_DESCRIPTIONS: dict[str, _Description] = {}


def register(layer_class: type | str, *description: Branch | Form) -> None:
    """Describe a layer class; a second description of the same class replaces the first. It holds for the code that
    the class has now, and for subclasses that run the same.

    Args:
        layer_class: the class, or its qualified name "package.module.Class".
        description: its residual branches in the order in which they run; or its forms, if its config decides which
            branches it has: the first that a layer has is taken.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified(layer_class)
    forms = [form for form in description if isinstance(form, Form)]
    branches = tuple(branch for branch in description if isinstance(branch, Branch))
    if forms and branches:
        raise ValueError(f"{name}: give branches or forms, not both; a form has its branches inside")
    for form in forms or [Form(branches)]:
        names = [branch.name for branch in form.branches]
        if not names or len({*names}) < len(names):
            raise ValueError(f"{name}: give one or more branches with different names, got {names}")
    code = None if isinstance(layer_class, str) else code_of(layer_class)
    _DESCRIPTIONS[name] = _Description(tuple(forms) or (Form(branches),), code)


def branches_of(layer_class: type) -> tuple[Branch, ...] | tuple[Form, ...] | None:
    """The description of a class or of the nearest described base class, as `register` takes it; None if there is
    none."""
    base = _described_base(layer_class)
    if base is None:
        return None
    forms = _DESCRIPTIONS[_qualified(base)].forms
    return forms[0].branches if len(forms) == 1 and not forms[0].when else forms


def branches_in(name: str, layer: nn.Module) -> tuple[Branch, ...]:
    """Branches of a module, none if it is no described layer.

    Args:
        name: of the layer, for messages.

    Raises:
        ValueError: it runs other code than the class that is described, or has a form that is not described.
    """
    base = _described_base(type(layer))
    if base is None:
        return ()
    description = _DESCRIPTIONS[_qualified(base)]
    check_own_forward(name, layer, base, description.code)
    form = next((form for form in description.forms if form.is_of(layer)), None)
    if form is None:
        forms = [", ".join(f"{path} = {value!r}" for path, value in known.when.items()) for known in description.forms]
        raise ValueError(
            f"{name!r}: this form of {type(layer).__name__} is not described; known are "
            f"{listed(forms, separator='; ')}. {how_to_describe(layer)}"
        )
    return form.branches


def how_to_describe(layer: nn.Module) -> str:
    """What a user writes to describe the class of a layer, with the names that the layer has."""
    children = ", ".join(name for name, child in layer.named_children() if any(True for _ in child.parameters()))
    return (
        "If each of its branches is x + after(body(norm(x))), describe it before deepspeed.initialize, with names of "
        f"its submodules ({children}) for the dots:\n"
        "from sdp_deepspeed.architectures import Branch, register\n"
        f'register("{_qualified(type(layer))}",\n'
        '         Branch("attention", norm="...", body="..."), Branch("mlp", norm="...", body="..."))\n'
        "(more: sdp_deepspeed/architectures/README.md)"
    )


def described() -> list[str]:
    """Names of all described layer classes, for error messages."""
    return sorted(_DESCRIPTIONS)


def _described_base(layer_class: type) -> type | None:
    return next((base for base in layer_class.__mro__ if _qualified(base) in _DESCRIPTIONS), None)


def _qualified(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"
