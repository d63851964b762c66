"""Counts what Python asks of PyTorch."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Calls(TorchFunctionMode):
    """All functions that are called: views, copies, launches. (A shape or a device costs nothing worth it.)

    Attributes:
        names: of each call.
        num_views: tensors that splits gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_views = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name != "__get__":
            self.names.append(name)
        result = func(*args, **(kwargs or {}))
        self.num_views += len(result) if "split" in name else 0
        return result
