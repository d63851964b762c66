"""Support for `deepspeed.utils.safe_get_full_fp32_param` and related functions on our engine's parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sdp_deepspeed.parallel.full_tensors import read_full, write_full

if TYPE_CHECKING:
    from sdp_deepspeed.engine.engine import SubnetworkEngine


def install_full_access(parameter: nn.Parameter, name: str, engine: SubnetworkEngine) -> None:
    """Install the attributes that DeepSpeed's functions use. Those functions are then collective.

    Args:
        name: dense name of the parameter.
        engine: its `optimizer.sharded` is the sharded optimizer.
    """
    access, target = _Access(engine, name), parameter
    vars(target).update(
        _hp_mapping=None,  # if present, DeepSpeed's functions call the methods
        _hp_grad=access,  # if not None, they do not return this rank's local gradient
        get_full_hp_param=access.get,
        set_full_hp_param=access.set,
        get_full_hp_grad=access.get_gradient,
        set_full_hp_grad=access.set_gradient,
    )


class _Access:
    """The methods of one Parameter. Holds weak references; a pickled Parameter has no engine."""

    def __init__(self, engine: SubnetworkEngine | None, name: str) -> None:
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        if (engine := self._engine()) is not None and engine.mask.is_applied and engine.mask.is_partial(self._name):
            raise RuntimeError(
                f"{self._name}: this rank holds only a part, so it cannot be pickled; save the state dict inside "
                "`with engine.dense():` on all ranks"
            )
        return _Access, (None, self._name)

    def _optimizer(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(f"the engine that trained {self._name!r} no longer exists")
        return engine.optimizer.sharded

    def get(self, optim_state_key: str | None = None) -> torch.Tensor:
        kind: Any = "weight" if optim_state_key is None else "state"
        return read_full(self._optimizer(), self._name, kind, optim_state_key or "")

    def set(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        kind: Any = "weight" if optim_state_key is None else "state"
        write_full(self._optimizer(), self._name, value, kind, optim_state_key or "")

    def get_gradient(self) -> torch.Tensor:
        return read_full(self._optimizer(), self._name, "gradient")

    def set_gradient(self, value: torch.Tensor) -> None:
        write_full(self._optimizer(), self._name, value, "gradient")
