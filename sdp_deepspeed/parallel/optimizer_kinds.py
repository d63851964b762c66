"""Which optimizers can step shards: those that update each element by itself, and Muon with whole tensors."""

from __future__ import annotations

import torch

# Class names, or DeepSpeed's `optimizer.type`, in lower case.
# fmt: off
_ELEMENTWISE = {
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd", "lion",
    "fusedadam", "fusedlion", "deepspeedcpuadam", "deepspeedcpuadagrad", "deepspeedcpulion",
}
# An element's update depends on others, within a tensor or across tensors.
_OTHERS = {
    "adafactor", "distributedshampoo", "fusedlamb", "galoreadafactor", "galoreadamw", "lamb", "lars", "lbfgs",
    "onebitadam", "onebitlamb", "shampoo", "soap", "sparseadam", "zerooneadam",
}
# fmt: on
# By class name, where the class must come from: others of this name have collectives of their own.
_WHOLE_TENSORS = {"Muon": "torch.optim", "MuonWithAuxAdam": "deepspeed.runtime.zero.muon"}


def is_elementwise(name: str) -> bool:
    """Whether optimizers of this name update each element by itself."""
    return name.lower() in _ELEMENTWISE


def check_optimizer(kind: type[torch.optim.Optimizer] | str, *, allow: bool) -> None:
    """Refuse optimizers whose sharded step may not be their step.

    Args:
        kind: class of a client's optimizer, or DeepSpeed's `optimizer.type`.
        allow: whether the user says that an unknown optimizer updates each element by itself.

    Raises:
        ValueError: by name.
    """
    name = kind if isinstance(kind, str) else kind.__name__
    known = is_elementwise(name) or (name.lower() == "muon" if isinstance(kind, str) else _updates_whole_tensors(kind))
    if name.lower() in _OTHERS:
        raise ValueError(
            f"optimizer {name!r} does not update each element by itself; use Adam, AdamW, SGD, Lion or "
            "Muon, whose steps can be sharded"
        )
    if not known and not allow:
        raise ValueError(
            f"optimizer {name!r} is not known to update each element by itself; if it does, set allow_optimizer or "
            "zero_allow_untested_optimizer to true"
        )


def groups_of_whole_tensors(optimizer: torch.optim.Optimizer) -> set[int]:
    """Indices of the param groups whose tensors must each be stepped as a whole."""
    if not _updates_whole_tensors(type(optimizer)):
        return set()
    # DeepSpeed's says for each group whether Muon steps it, or Adam
    return {index for index, group in enumerate(optimizer.param_groups) if group.get("use_muon", True)}


def _updates_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    return any(base.__module__.startswith(_WHOLE_TENSORS.get(base.__name__, "\0")) for base in kind.__mro__)
