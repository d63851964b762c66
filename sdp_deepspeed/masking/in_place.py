"""Does a model change tensors in place where a lacking branch hands its input on?

`x + nothing` may be `x` itself as long as nobody writes to it: in the dense model it is a tensor of its own.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.own_forward import code_of, unwrapped


def changes_in_place(model: nn.Module, branches: Sequence[LocatedBranch]) -> bool:
    """Whether anything outside of the branches does, as far as byte code shows: the layers' methods, the forward passes
    of all other modules, and stock modules with `inplace`. What only seems to, such as a sum of losses, counts too."""
    layers = {branch.layer for branch in branches}
    inside = {
        module for branch in branches for name in branch.modules for module in model.get_submodule(name).modules()
    }
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    classes = {(type(module), name in layers) for name, module in outside.items()}
    return any(getattr(module, "inplace", False) is True for module in outside.values()) or any(
        _class_changes_in_place(module_class, follows) for module_class, follows in classes
    )


def _class_changes_in_place(module_class: type, follows: bool) -> bool:
    """
    Args:
        follows: whether methods that `forward` calls are looked at too.
    """
    if module_class.__module__.startswith("torch."):  # BatchNorm counts batches in place
        return False
    methods = {name: unwrapped(method) for name, method in code_of(module_class).items()}
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for code in _codes(getattr(methods[name], "__code__", None)):
            if any(map(_writes, code.co_names)) or any(map(_assigns, dis.get_instructions(code))):
                return True
            waiting += [called for called in code.co_names if follows and called in methods and called not in seen]
    return False


def _codes(code: Any) -> Iterator[CodeType]:
    """With those of functions inside it."""
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)


def _writes(name: str) -> bool:
    """As `relu_` and `add_`."""
    return name.endswith("_") and not name.endswith("__")


def _assigns(instruction: dis.Instruction) -> bool:
    """As `x += y`."""
    return instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
