"""May a model write to tensors in place where a lacking branch hands its input on?

`x + nothing` may be `x` itself as long as nobody writes to it: in the dense model it is a tensor of its own. Of the
layers that this package describes that is known; of all others it is not asked, since there are more ways to write to a
tensor than can be found in code.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.families import FAMILIES
from sdp_deepspeed.architectures.own_forward import is_of_hosts


def may_write_in_place(model: nn.Module, branches: Sequence[LocatedBranch]) -> bool:
    """Whether a layer is not of FAMILIES, or another module outside of the branches is not a host's class as it is, or
    has `inplace`. One is enough for all."""
    inside = {
        module for branch in branches for name in branch.modules for module in model.get_submodule(name).modules()
    }
    if not {_qualified(type(model.get_submodule(branch.layer))) for branch in branches} <= FAMILIES.keys():
        return True
    outside = [module for module in model.modules() if module not in inside]
    return not all(map(is_of_hosts, {*map(type, outside)})) or any(
        "forward" in vars(module) or getattr(module, "inplace", False) is True for module in outside
    )


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
