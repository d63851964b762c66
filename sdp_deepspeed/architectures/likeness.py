"""What two models have in common whose forward passes run the same operations, whatever their weights are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

_MAX_ELEMENTS = 2**16  # of a buffer whose values are compared
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    BuiltinFunctionType,
)


def likeness(model: Any) -> Hashable:
    """A key that is equal for models of the same modules, forwards, attributes, small buffers, and shapes of
    parameters. A model with an attribute that cannot be compared, such as a closure, equals no other."""
    numbers: dict[int, int] = {}

    def of(value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, FunctionType):
            return value if value.__closure__ is None else object()
        if isinstance(value, partial):
            return of(value.func), of(value.args), of(value.keywords)
        if id(value) in numbers:
            return "known", numbers[id(value)]
        numbers[id(value)] = len(numbers)
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if isinstance(value, Mapping):
            return type(value), tuple((of(key), of(item)) for key, item in value.items())
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(of, value))
        if isinstance(value, list | tuple):
            return type(value), tuple(of(item) for item in value)
        if isinstance(value, nn.Module):
            items = tuple((name, of(item)) for name, item in vars(value).items() if name != "training")
            return type(value), type(value).forward, items  # a class may have been given another forward
        if is_dataclass(value) or hasattr(value, "to_dict"):  # a config, or an example of inputs
            return type(value), tuple((name, of(item)) for name, item in vars(value).items())
        return object()

    def of_tensor(tensor: torch.Tensor) -> Hashable:
        form = type(tensor), tensor.shape, tensor.dtype
        has_values = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        if not has_values or tensor.numel() > _MAX_ELEMENTS:
            return form
        return *form, tuple(tensor.flatten().tolist())

    return of(model)
