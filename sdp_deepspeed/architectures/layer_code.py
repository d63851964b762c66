"""Check that a layer runs the code that its description was written for.

A description is about the `forward` of its class. A subclass with another forward, or a class or layer whose forward
was replaced, may compute something else, and would silently train the wrong function.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

# Methods that a forward pass does not run.
_NOT_RUN = frozenset(dir(nn.Module)) - {"forward", "__call__"} | {"__init__", "reset_parameters"}
_WRAPPED = ("__func__", "__wrapped__")
# Packages whose wrappers do not change results.
_HOSTS = frozenset({"transformers", "torch", "accelerate", "deepspeed"})


def code_of(layer_class: type) -> dict[str, Any]:
    """Methods of a class and its bases, by name, without the hosts' wrappers."""
    bases = [base for base in layer_class.__mro__ if base not in nn.Module.__mro__]
    names = {name for base in bases for name, value in vars(base).items() if _is_method(value)} - _NOT_RUN
    names |= {"forward", "__call__"}
    return {name: _method(layer_class, name) for name in sorted(names)}


@cache
def names_read(layer_class: type) -> frozenset[str]:
    """Names of attributes (and globals) in the methods of a class that a forward pass may run."""
    methods = [_unwrapped(getattr(method, "fget", method)) for method in code_of(layer_class).values()]
    return frozenset(name for method in methods for name in _names_in(getattr(method, "__code__", None)))


def _names_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def check_layer_code(name: str, layer: nn.Module, described: type, code: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a layer that runs other code than the described class.

    Args:
        code: methods of `described` when it was described; None if it was described by name.
    """
    layer_class = type(layer)
    methods = code_of(described)
    for method, function in methods.items():
        if _method(layer_class, method) is not function:
            raise ValueError(
                f"{name!r}: {layer_class.__name__} has its own {method!r}, so the description of its base class "
                f"{described.__name__} may not apply. {_advice(layer_class, described)}"
            )
    if _bare(methods) != _bare(code) if code is not None else not is_in_its_source(described):
        raise ValueError(
            f"{name!r}: methods of {described.__name__} were replaced after it was described, so its description may "
            f"not apply. {_advice(described, described)}"
        )
    for method, function in methods.items():
        replacement = vars(layer).get(method)
        if replacement is not None and _unwrapped(replacement) is not _unwrapped(function):
            raise ValueError(
                f"{name!r}: this {layer_class.__name__} has its own method {method!r}, so its description may not "
                "apply; wrap the original with functools.wraps, or describe a separate class"
            )


def _advice(layer_class: type, described: type) -> str:
    line = f"architectures.register({layer_class.__name__}, *architectures.branches_of({described.__name__}))"
    return (
        "If each branch still is x + after(body(norm(x))), call before deepspeed.initialize or fully_shard: "
        f"{line}. If not, describe its branches (docs/guide.md)"
    )


def _method(layer_class: type, name: str) -> Any:
    """A method of a class, without wrappers of hosts: Transformers wraps methods of each subclass. Other wrappers count
    as different methods."""
    method = inspect.getattr_static(layer_class, name)
    while hasattr(method, "__wrapped__") and _origin(method) in _HOSTS:
        method = method.__wrapped__
    return method


def _origin(function: Any) -> str:
    """Package that defines a function; unlike `__module__`, `functools.wraps` does not copy it."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def is_wrapper_of_its_class(function: Any, module_class: type) -> bool:
    """Whether the `forward` of a module instance wraps the one of its class, according to `functools.wraps`."""
    return _unwrapped(function) is _unwrapped(_method(module_class, "forward"))


def _bare(code: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _unwrapped(function) for name, function in code.items()}


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (property, staticmethod, classmethod))


def is_in_its_source(layer_class: type[nn.Module]) -> bool:
    """Whether the forward of a class is the original one, by qualified names; True without a forward."""
    if layer_class.forward is nn.Module.forward:
        return True
    definer = next(base for base in layer_class.__mro__ if "forward" in vars(base))
    function = _unwrapped(vars(definer)["forward"])
    names = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return names == (definer.__module__, f"{definer.__qualname__}.forward")


def _unwrapped(function: Any) -> Any:
    """Unwrap `functools.wraps`, `torch.compile` and bound methods."""
    inner = function
    while inner is not None:
        function = inner
        inner = next((value for name in _WRAPPED if (value := getattr(function, name, None)) is not None), None)
    return function
