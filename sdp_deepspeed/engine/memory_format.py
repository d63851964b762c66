"""DeepSpeed broadcasts a model's parameters as they lie in memory, and cannot if they are channels last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def row_major(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """In the block parameters lie row-major; after it as before, with the values that they then have."""
    before = [(p, p.data) for p in parameters if not p.is_contiguous() or (p.dim() and p.stride(-1) != 1)]
    for parameter, data in before:  # also where the last dim has one element, and any stride
        parameter.data = data.clone(memory_format=torch.contiguous_format)
    try:
        yield
    finally:
        for parameter, data in before:
            data.copy_(parameter.data)
            parameter.data = data
