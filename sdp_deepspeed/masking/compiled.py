"""What `torch.compile` leaves on a module: methods of its own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.masking.own_forward import runs_by_another_forward
from sdp_deepspeed.messages import quoted


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
