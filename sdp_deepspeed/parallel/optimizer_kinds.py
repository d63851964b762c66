"""Optimizers that can step shards: elementwise ones, and Muon with whole tensors."""

from __future__ import annotations

import torch

# Class names, or DeepSpeed's `optimizer.type`, in lower case.
# fmt: off
_ELEMENTWISE = {
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd", "lion",
    "fusedadam", "fusedlion", "deepspeedcpuadam", "deepspeedcpuadagrad", "deepspeedcpulion",
}
# Not elementwise: an update depends on other elements.
_OTHERS = {
    "adafactor", "distributedshampoo", "fusedlamb", "galoreadafactor", "galoreadamw", "lamb", "lars", "lbfgs",
    "onebitadam", "onebitlamb", "shampoo", "soap", "sparseadam", "zerooneadam",
}
# fmt: on
# Module of the class, by class name: other classes with these names issue their own collectives.
_WHOLE_TENSORS = {"Muon": "torch.optim", "MuonWithAuxAdam": "deepspeed.runtime.zero.muon"}


def is_elementwise(name: str) -> bool:
    """Whether optimizers of this name are known to be elementwise."""
    return name.lower() in _ELEMENTWISE


def check_optimizer(kind: type[torch.optim.Optimizer] | str, *, allow: bool) -> None:
    """Raise ValueError for optimizers that cannot be sharded, or are not known to be elementwise.

    Args:
        kind: class of a client's optimizer, or DeepSpeed's `optimizer.type`.
        allow: whether the user declares an unknown optimizer elementwise.
    """
    name = kind if isinstance(kind, str) else kind.__name__
    known = is_elementwise(name) or (name.lower() == "muon" if isinstance(kind, str) else _updates_whole_tensors(kind))
    if name.lower() in _OTHERS:
        raise ValueError(
            f"optimizer {name!r} is not elementwise, so it cannot be sharded; use Adam, AdamW, SGD, Lion or Muon"
        )
    if not known and not allow:
        raise ValueError(
            f"optimizer {name!r} is not known to be elementwise; if it is, set allow_optimizer or "
            "zero_allow_untested_optimizer to true"
        )


def groups_of_whole_tensors(optimizer: torch.optim.Optimizer) -> set[int]:
    """Indices of param groups whose tensors must be stepped as a whole."""
    if not _updates_whole_tensors(type(optimizer)):
        return set()
    # DeepSpeed's class has a flag in each group: Muon or Adam
    return {index for index, group in enumerate(optimizer.param_groups) if group.get("use_muon", True)}


def _updates_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    return any(base.__module__.startswith(_WHOLE_TENSORS.get(base.__name__, "\0")) for base in kind.__mro__)
