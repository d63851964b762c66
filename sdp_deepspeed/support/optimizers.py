"""Which optimizers are known: those that update each element by itself, and those that update each tensor by itself."""

from __future__ import annotations

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
WHOLE_TENSOR_OPTIMIZERS = ("Muon", "Adafactor", "Lamb")  # as DeepSpeed's `optimizer.type`


def is_elementwise(name: str) -> bool:
    """Whether an optimizer's name (DeepSpeed's `optimizer.type`, or a class name) is in the list."""
    return name.lower() in {known.lower() for known in ELEMENTWISE_OPTIMIZERS}


def steps_whole_tensors(kind: type[Any]) -> bool:
    """Whether an optimizer's class updates each tensor by itself, or inherits from one that does."""
    homes = ((base.__module__, _WHOLE_TENSORS.get(base.__name__)) for base in kind.__mro__)
    return any(home is not None and module.startswith(home) for module, home in homes)


def is_known(kind: str | type[Any]) -> bool:
    """Whether an optimizer needs no permission.

    Args:
        kind: DeepSpeed's `optimizer.type`, or the class of a client optimizer.
    """
    if isinstance(kind, str):
        return is_elementwise(kind) or kind.lower() in {name.lower() for name in WHOLE_TENSOR_OPTIMIZERS}
    return is_elementwise(kind.__name__) or steps_whole_tensors(kind)
