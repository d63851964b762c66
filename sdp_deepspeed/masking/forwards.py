"""Replace the `forward` of a module instance, as Accelerate's hooks do.

The new forward is bound to a `ReplacedForward`, which refers to the module and its previous forward, so that a deep
copy of a masked module is an independent masked module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class ReplacedForward:
    """A replaced forward.

    Args:
        module: whose attributes `run_with` changes; by default the one whose forward it is.
    """

    module: Any
    previous: Callable[..., Any]
    state: Any


def replace_forward(
    module: nn.Module, function: Callable[..., Any], state: Any = None, of: nn.Module | None = None
) -> None:
    """Make `module.forward` call `function(ReplacedForward(...), *args, **kwargs)`. It may happen several times.

    Args:
        of: `ReplacedForward.module`.
    """
    replaced = ReplacedForward(module if of is None else of, module.forward, state)
    vars(module).update(forward=MethodType(function, replaced), _sdp_forward=replaced)


def restore_forward(module: nn.Module) -> None:
    """Undo the last `replace_forward`, and any changes of the forward since."""
    previous = vars(module).pop("_sdp_forward").previous
    del vars(module)["forward"]
    if isinstance(outer := getattr(previous, "__self__", None), ReplacedForward):
        vars(module)["_sdp_forward"] = outer
    if getattr(previous, "__func__", None) is not type(module).forward:
        vars(module)["forward"] = previous


def run_with(forward: ReplacedForward, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward with other values of its attributes. Instance attributes precede parameters."""
    attributes = vars(forward.module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        return forward.previous(*args, **kwargs)
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]
