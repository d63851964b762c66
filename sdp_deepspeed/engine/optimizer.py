"""DeepSpeed's surface of a ZeRO optimizer over the sharded optimizer of `parallel`."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NoReturn

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from sdp_deepspeed.parallel.optimizer import ShardedOptimizer


class SubnetworkOptimizer(ZeROOptimizer):
    """What DeepSpeed's engine and its users ask of an optimizer.

    Args:
        sharded: does the work.
        loss_scaler: DeepSpeed's.
        skips_overflow: whether a step whose gradient is not finite is left out.
        reports_norm: whether the gradient norm is reported (`compute_grad_norm`).
        process_group: the data-parallel one.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None

    def __init__(
        self,
        sharded: ShardedOptimizer,
        loss_scaler: LossScalerBase,
        *,
        skips_overflow: bool,
        reports_norm: bool,
        process_group: Any,
    ) -> None:
        super().__init__()
        self.sharded, self.loss_scaler = sharded, loss_scaler
        self.skips_overflow, self.reports_norm = skips_overflow, reports_norm
        self.dp_process_group = process_group
        self.external_loss_scale: float | None = None
        self.overflow = False
        self._global_grad_norm: float | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.sharded.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.sharded.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.sharded.optimizer.state

    def step(self, closure: None = None) -> None:
        """Average, clip, step, return weights; every rank calls it.

        Raises:
            ValueError: a closure is given, which would need a forward pass of all ranks.
        """
        if closure is not None:
            raise ValueError("step() takes no closure; call engine.backward(loss) before it")
        scale = self.loss_scale
        self.overflow = not self.sharded.step(scale, check_overflow=self.skips_overflow)
        self.loss_scaler.update_scale(self.overflow)
        norm = math.inf if self.overflow else float(self.sharded.norm)  # type: ignore[arg-type]
        self._global_grad_norm = norm if self.reports_norm else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; at stage 2 all ranks call it together."""
        self.sharded.zero_grad()

    def has_gradients(self) -> bool:
        """Whether there are gradients of a step that has begun."""
        return self.sharded.has_gradients()

    # ---- loss scale ---------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.loss_scaler.loss_scale if self.external_loss_scale is None else self.external_loss_scale

    cur_scale = loss_scale  # the name under which DeepSpeed's monitor asks for it

    def override_loss_scale(self, loss_scale: float) -> None:
        """As DeepSpeed's: losses are scaled by this from now on."""
        self.custom_loss_scaler, self.external_loss_scale = True, loss_scale

    def needs_scaler(self) -> bool:
        return bool(self.loss_scaler.dynamic or self.loss_scale != 1.0)

    # ---- what DeepSpeed's engine calls on its own ZeRO optimizers -----------------------------------------------

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing: `step` takes whatever was accumulated (`managed_gradient_accumulation: false`)."""

    def refresh_fp32_params(self) -> None:
        """Take fp32 masters from weights that were changed from outside."""
        self.sharded.refresh_shards()

    update_lp_params = empty_partition_cache = finalize_gradient_accumulation_boundary

    def offload_states(
        self, include: Container[OffloadStateTypeEnum] | None = None, *, pin_memory: bool = True, **_: Any
    ) -> None:
        """As DeepSpeed's, of masters and moments; weights and gradients stay where they are."""
        self.sharded.offload_states(
            states=include is None or OffloadStateTypeEnum.optim_states in include,
            masters=include is None or OffloadStateTypeEnum.hp_params in include,
            pin_memory=pin_memory,
        )

    def reload_states(self, **_: Any) -> None:
        self.sharded.reload_states()

    def state_dict(self) -> dict[str, Any]:
        """To be thrown away, as hosts do that save the engine's own checkpoint (Lightning); whoever reads it gets an
        error, since it would be this rank's share alone."""
        return _NoState()

    def load_state_dict(self, state: Mapping[str, Any]) -> NoReturn:
        """RuntimeError, with the calls that do it."""
        _refuse_state()

    def destroy(self) -> None:
        self.sharded.close()


def _refuse_state(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "SubnetworkOptimizer has no state dict of its own: a rank owns only a share of the state. Save with "
        "engine.save_checkpoint and load with engine.load_checkpoint, on any layout"
    )


class _NoState(dict[str, Any]):
    """Raises as soon as anybody reads, copies or pickles it."""

    __getitem__ = __contains__ = __iter__ = __len__ = __reduce_ex__ = _refuse_state
    get = keys = values = items = pop = copy = _refuse_state
