"""The weights that a model multiplies with, and the activations that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that are multiplied with (not look-up tables), by name."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in multiplied}


class Saved:
    """What autograd keeps inside a `with` block, each storage once, without the model's own tensors.

    Attributes:
        tensors: as they were saved, which also keeps addresses from being used twice.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.tensors: list[torch.Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in self._own:
            self.tensors.append(tensor)
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def num_bytes(self) -> int:
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
