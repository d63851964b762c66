"""Which optimizers are known: those that update each element by itself, and those that update each tensor by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ELEMENTWISE_OPTIMIZERS = (
    "Adam",
    "AdamW",
    "FusedAdam",
    "DeepSpeedCPUAdam",
    "SGD",
    "Adagrad",
    "DeepSpeedCPUAdagrad",
    "Lion",
    "FusedLion",
    "DeepSpeedCPULion",
)
# By class name, with where the class must come from: other optimizers called Muon have collectives of their own, which
# ranks that own other tensors would not enter.
_WHOLE_TENSORS = {
    "Muon": "torch.optim",
    "MuonWithAuxAdam": "deepspeed.runtime.zero.muon.muon_optimizer",
    "SingleDeviceMuon": "deepspeed.runtime.zero.muon",
    "Adafactor": "",
    "Lamb": "",
    "FusedLamb": "deepspeed",
    "FusedLAMB": "",
}
# By class name, and where the class comes from: their learning rate bounds a step size that they choose by themselves.
_OWN_STEPS = {"Adafactor": "torch.optim"}
# Options that say how a step is computed and not what it is. No checkpoint decides them.
HOW = ("fused", "foreach", "capturable", "differentiable")
WHOLE_TENSOR_OPTIMIZERS = ("Muon", "Adafactor", "Lamb")  # as DeepSpeed's `optimizer.type`


def is_elementwise(name: str) -> bool:
    """Whether an optimizer's name (DeepSpeed's `optimizer.type`, or a class name) is in the list."""
    return name.lower() in {known.lower() for known in ELEMENTWISE_OPTIMIZERS}


def steps_whole_tensors(kind: type[Any]) -> bool:
    """Whether an optimizer's class updates each tensor by itself, or inherits from one that does."""
    return _is_one_of(kind, _WHOLE_TENSORS)


def bounds_own_steps(kind: type[Any]) -> bool:
    """Whether an optimizer's learning rate is only a bound of its steps: half of it may be the same step."""
    return _is_one_of(kind, _OWN_STEPS)


def _is_one_of(kind: type[Any], named: Mapping[str, str]) -> bool:
    """Whether a class, or one that it inherits from, is among those of these names and homes."""
    homes = ((base.__module__, named.get(base.__name__)) for base in kind.__mro__)
    return any(home is not None and module.startswith(home) for module, home in homes)


def is_known(kind: str | type[Any]) -> bool:
    """Whether an optimizer needs no permission.

    Args:
        kind: DeepSpeed's `optimizer.type`, or the class of a client optimizer.
    """
    if isinstance(kind, str):
        return is_elementwise(kind) or kind.lower() in {name.lower() for name in WHOLE_TENSOR_OPTIMIZERS}
    return is_elementwise(kind.__name__) or steps_whole_tensors(kind)
