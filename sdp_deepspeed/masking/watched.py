"""Which numbers a body's forward reads from its attributes: what its sizes may come from."""

from __future__ import annotations

from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.mixins import mixed_in
from sdp_deepspeed.masking.trial import Alone, Trial


class _Watched(nn.Module):
    """Mixed in before a body's class."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if type(value) is int and value > 1 and name in object.__getattribute__(self, "__dict__"):
            object.__getattribute__(self, "__dict__").setdefault("_sdp_numbers", {})[name] = value
        return value


def read_numbers(trial: Trial, branch: LocatedBranch) -> dict[str, int]:
    """Of the whole body in a forward pass of its layer, by attribute."""
    numbers: dict[str, int] = {}

    def watch(alone: Alone) -> None:
        for name in branch.bodies:
            body = alone.get_submodule(name)
            body.__dict__["_sdp_numbers"] = numbers
            body.__class__ = mixed_in(_Watched, type(body))

    trial.run(watch)
    return numbers
