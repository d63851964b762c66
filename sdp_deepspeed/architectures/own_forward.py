"""Does a layer run the code that its description was written for?

A description says what `forward` of its class computes. A subclass with a forward of its own, or a class or a layer
whose forward was replaced, may compute something else: it would train another function without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

# What is not run by a forward pass, though a class may define it.
_NOT_RUN = frozenset(dir(nn.Module)) - {"forward", "__call__"} | {"__init__", "reset_parameters"}
_WRAPPED = ("__func__", "__wrapped__")
_PYTHON = frozenset({"abc", "builtins", "typing"})
_HOSTS = frozenset({"transformers", "torch", "accelerate", "deepspeed"})  # wrap forwards without changing results


def code_of(layer_class: type) -> dict[str, Any]:
    """What a class runs in its forward pass: its methods by name, its bases' included, without the hosts' wrappers."""
    bases = [base for base in layer_class.__mro__ if base not in nn.Module.__mro__]
    names = {name for base in bases for name, value in vars(base).items() if _is_method(value)} - _NOT_RUN
    names |= {"forward", "__call__"}
    return {name: _method(layer_class, name) for name in sorted(names)}


def check_own_forward(name: str, layer: nn.Module, described: type, code: Mapping[str, Any] | None) -> None:
    """Refuse a layer that runs other code than the class whose description it takes.

    Args:
        name: of the layer, for the message.
        described: its class, or the nearest base class that is described.
        code: of `described` when it was described; None if it was described by its name, before it was imported.

    Raises:
        ValueError: with the line that describes the layer's class.
    """
    layer_class, own_code = type(layer), code_of(described)
    for method, function in own_code.items():
        if _method(layer_class, method) is not function:
            raise ValueError(
                f"{name!r}: {layer_class.__name__} has its own {method!r}, so the description of its base class "
                f"{described.__name__} may not be true of it. {_advice(layer_class, described)}"
            )
    if _bare(own_code) != _bare(code) if code is not None else not is_in_its_source(described):
        raise ValueError(
            f"{name!r}: what {described.__name__} runs was replaced after it was described, so its description may not "
            f"be true of it. {_advice(described, described)}"
        )
    for method, function in own_code.items():
        own = vars(layer).get(method)
        if own is not None and _unwrapped(own) is not _unwrapped(function):
            raise ValueError(
                f"{name!r}: this {layer_class.__name__} has a method {method!r} of its own, so the description of its "
                "class may not be true of it. If it calls the one of the class, make it with functools.wraps, or set "
                "it after deepspeed.initialize or fully_shard; if not, give the layer a class of its own and describe "
                "that"
            )


def _advice(layer_class: type, described: type) -> str:
    line = f"architectures.register({layer_class.__name__}, *architectures.branches_of({described.__name__}))"
    return (
        "If each of its branches still is x + after(body(norm(x))), say so before deepspeed.initialize or fully_shard: "
        f"{line}. If not, describe its branches (docs/guide.md)"
    )


def _method(layer_class: type, name: str) -> Any:
    """Of a class, below what a host has wrapped around it: Transformers does so for each subclass. A wrapper of anybody
    else is a method of its own, whatever it says that it wraps."""
    method = inspect.getattr_static(layer_class, name)
    while hasattr(method, "__wrapped__") and _origin(method) in _HOSTS:
        method = method.__wrapped__
    return method


def _origin(function: Any) -> str:
    """The package whose code it is; `functools.wraps` copies `__module__`, and not this."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def is_of_hosts(module_class: type) -> bool:
    """Whether a class, its bases and its forward are code of the hosts alone."""
    packages = {base.__module__.partition(".")[0] for base in module_class.__mro__}
    return packages | {_origin(_method(module_class, "forward"))} <= _HOSTS | _PYTHON


def is_wrapper_of_its_class(function: Any, module_class: type) -> bool:
    """Whether a `forward` that a module has of its own says that it wraps the one of its class."""
    return _unwrapped(function) is _unwrapped(_method(module_class, "forward"))


def _bare(code: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _unwrapped(function) for name, function in code.items()}


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (property, staticmethod, classmethod))


def is_in_its_source(layer_class: type[nn.Module]) -> bool:
    """Whether the forward of a class is the one in its source, by the names that Python gave both; or there is none."""
    if layer_class.forward is nn.Module.forward:
        return True
    definer = next(base for base in layer_class.__mro__ if "forward" in vars(base))
    function = _unwrapped(vars(definer)["forward"])
    names = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return names == (definer.__module__, f"{definer.__qualname__}.forward")


def _unwrapped(function: Any) -> Any:
    """What `functools.wraps`, `torch.compile` and binding to a module have wrapped."""
    inner = function
    while inner is not None:
        function = inner
        inner = next((value for name in _WRAPPED if (value := getattr(function, name, None)) is not None), None)
    return function
