"""What DeepSpeed and its users ask of any ZeRO optimizer, beside a step: its groups, its loss scale, its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase


def _refuse_state(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "SubnetworkOptimizer has no state dict of its own: a rank owns only a share of the state. Save with "
        "engine.save_checkpoint and load with engine.load_checkpoint, on any layout"
    )


class _NoState(dict[str, Any]):
    """Raises as soon as anybody reads, copies or pickles it."""

    __getitem__ = __contains__ = __iter__ = __len__ = __reduce_ex__ = _refuse_state
    get = keys = values = items = pop = copy = _refuse_state


class HostSurface(ZeROOptimizer):
    """The part of `SubnetworkOptimizer` that does no work.

    Args:
        optimizer: the wrapped one.
        loss_scaler: DeepSpeed's.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None

    def __init__(self, optimizer: torch.optim.Optimizer, loss_scaler: LossScalerBase) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.external_loss_scale: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.loss_scaler.loss_scale if self.external_loss_scale is None else self.external_loss_scale

    @property
    def cur_scale(self) -> float:
        """The name under which DeepSpeed's monitor asks for `loss_scale`."""
        return self.loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """As DeepSpeed's: losses are scaled by this from now on."""
        self.custom_loss_scaler = True
        self.external_loss_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before backward: by `engine.backward`, or by `engine.scale`."""
        return bool(self.loss_scaler.dynamic or self.loss_scale != 1.0)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing: `step` takes whatever was accumulated (`managed_gradient_accumulation: false`)."""

    def state_dict(self) -> dict[str, Any]:
        """To be thrown away, as hosts do that save the engine's own checkpoint (Lightning): whoever uses it gets an
        error, since this rank's share alone would be of use on the very same layout only."""
        return _NoState()

    def load_state_dict(self, state: Mapping[str, Any]) -> NoReturn:
        """Refused.

        Raises:
            RuntimeError: names the calls that do it.
        """
        _refuse_state()
