"""Between the end of `Init` and `deepspeed.initialize`: what is done to the model's tensors is written down as well.

Tensors without storage forget everything, and their versions do not count what goes through `.data`. So until the
model is taken, its deferred tensors are of a class that sees each function that they are given to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_RECORDING = "_sdp_recording"  # attribute of a watched tensor


class Recording(Protocol):
    """What writes down."""

    def again(self) -> AbstractContextManager[Any]:
        """Inside, everything is written down as it was under `Init`."""

    def is_deferred(self, tensor: torch.Tensor) -> bool:
        """Whether it has no data yet, or other data than it will have."""


def watch(tensors: Iterable[torch.Tensor], recording: Recording) -> None:
    """From now on what is done to those that are deferred goes to `recording`."""
    for tensor in tensors:
        kind = _WATCHED.get(type(tensor))
        if kind is not None and recording.is_deferred(tensor):
            tensor.__class__ = kind
            setattr(tensor, _RECORDING, recording)


def is_watched(tensor: torch.Tensor) -> bool:
    return type(tensor) in _WATCHED.values()


def unwatch(tensors: Iterable[torch.Tensor]) -> None:
    """Inverse of `watch`."""
    for tensor in tensors:
        if is_watched(tensor):
            tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
            tensor.__dict__.pop(_RECORDING, None)


def _record(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    recording: Recording = next(
        found for leaf in tree_leaves((args, kwargs)) if (found := getattr(leaf, _RECORDING, None)) is not None
    )
    with torch._C.DisableTorchFunctionSubclass():
        with recording.again():
            result = func(*args, **kwargs)
        watch((leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), recording)
    return result


class _WatchedTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _record(func, args, kwargs or {})


class _WatchedParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _record(func, args, kwargs or {})


_WATCHED: dict[type[torch.Tensor], type[torch.Tensor]] = {
    torch.Tensor: _WatchedTensor,
    nn.Parameter: _WatchedParameter,
}
