"""Optimizers that can step shards: elementwise ones, and Muon with whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask

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


def tensors_stepped_whole(
    optimizer: torch.optim.Optimizer,
    param_groups: Mapping[str, int],
    mask: Mask,
    *,
    tp_replicated: Collection[str],
    is_divided: bool,
) -> list[str]:
    """Names of tensors that the optimizer must step as a whole.

    Args:
        param_groups: param group index of each trained tensor.
        tp_replicated: tensors that are equal on all tensor-parallel ranks.
        is_divided: whether other tensors are divided among these ranks.

    Raises:
        ValueError: the same on all ranks: such a tensor is not a matrix, is cut, or is divided.
    """
    whole_groups = groups_of_whole_tensors(optimizer)
    names = [name for name, index in param_groups.items() if index in whole_groups]
    for name in names:
        if len(mask.shapes[name]) < 2:  # DeepSpeed's Muon would apply the raw gradient
            why = "is not a matrix; put it into a param group for AdamW (DeepSpeed's Muon: use_muon=False)"
        elif mask.pieces[name][0][0].dim is not None:
            why = "is cut into neurons or heads; use block units for it, or an elementwise optimizer"
        elif is_divided and name not in tp_replicated:
            why = "is divided among tensor-parallel ranks; use an elementwise optimizer"
        else:
            continue
        raise ValueError(f"{type(optimizer).__name__} updates whole matrices, and {name!r} {why}")
    return names


def _updates_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    return any(base.__module__.startswith(_WHOLE_TENSORS.get(base.__name__, "\0")) for base in kind.__mro__)
