"""What a pass of a model costs: matrix products, calls of attention, and the activations that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that are multiplied with (not look-up tables), by name."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in multiplied}


class Products:
    """Matrix products (mm, addmm) inside a `with` block: FLOPs and number of calls. Attention's own are not counted."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self.num_calls = 0

    def __enter__(self) -> Products:
        self._counter.__enter__()
        count = self._counter._count_flops

        def counted(func: Any, *rest: Any) -> Any:
            self.num_calls += func in _PRODUCTS
            return count(func, *rest)

        self._counter._count_flops = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)

    @property
    def flops(self) -> int:
        return sum(self._counter.get_flop_counts().get("Global", {}).get(kind, 0) for kind in _PRODUCTS)


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


@contextmanager
def counted_attention() -> Iterator[list[tuple[int, int]]]:
    """Calls of scaled dot product attention: numbers of query heads and of key heads."""
    calls: list[tuple[int, int]] = []
    original = nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append((query.shape[1], key.shape[1]))
        return original(query, key, *rest, **options)

    nn.functional.scaled_dot_product_attention = counting
    try:
        yield calls
    finally:
        nn.functional.scaled_dot_product_attention = original
