"""A `forward` that a module has beside its class's: kernels and wrappers of others come so.

One that was bound to its module runs a copy of the module as well, if all that it uses of it comes from its `self`.
Then it may become a class's. What else leads back to the module makes a copy run the original, in silence.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

_SETTLED: WeakValueDictionary[tuple[Any, type[nn.Module]], type[nn.Module]] = WeakValueDictionary()


def bound_forward(module: nn.Module) -> Any:
    """The function that somebody bound to a module as its `forward`, else None."""
    own = vars(module).get("forward")
    return own.__func__ if isinstance(own, MethodType) and own.__self__ is module else None


def runs_by_another_forward(module: nn.Module) -> bool:
    """Whether a module has a `forward` of its own that a copy of it would not run on itself, or for ever."""
    if "forward" not in vars(module):
        return False
    function = bound_forward(module)
    return function is None or any(map(_leads_back, _reached(function, {})))


def settle_forward(module: nn.Module) -> None:
    """Make a bound `forward` its class's: else it would come before all that is mixed in."""
    if (function := bound_forward(module)) is None:
        return
    kind: Any = type(module)
    if (settled := _SETTLED.get((function, kind))) is None:
        settled = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": function})
        _SETTLED[function, kind] = settled
    del module.forward
    module.__class__ = settled


def _leads_back(value: Any) -> bool:
    """To weights; or to itself, as a function that asks for the `forward` of its module's class would find it."""
    if isinstance(value, FunctionType):
        names = value.__code__.co_names  # of attributes as well
        return "forward" in names and ("type" in _globals_read(value) or "__class__" in names)
    return isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters()))


def _reached(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """A value, and what is in it: of functions what they keep, of methods what they are bound to."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    for inside in _inside(value):
        yield from _reached(inside, seen)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return _kept(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _kept(function: FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and which globals it reads, but for functions of a file."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found = [function.__globals__[name] for name in _globals_read(function) & function.__globals__.keys()]
    return [*cells, *defaults, *(each for each in found if isinstance(each, _OF_A_MODEL))]


def _globals_read(function: FunctionType) -> set[str]:
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}


_OF_A_MODEL = nn.Module | nn.Parameter | MethodType | partial
