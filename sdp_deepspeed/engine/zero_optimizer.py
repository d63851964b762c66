"""What DeepSpeed's engine calls on a ZeRO optimizer, passed on to the sharded optimizer (parallel/optimizer.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from sdp_deepspeed.engine.core import Core
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer

_MODES = ("train", "eval")  # methods of optimizers with modes, such as schedule-free ones


class SubnetworkOptimizer(ZeROOptimizer):
    """The optimizer of DeepSpeed's engine; that of `core` is the implementation.

    Args:
        skips_overflow: whether to skip steps with non-finite gradients.
        reports_norm: whether to report the gradient norm (`compute_grad_norm`).
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None

    def __init__(
        self,
        core: Core,
        loss_scaler: LossScalerBase,
        *,
        skips_overflow: bool,
        reports_norm: bool,
        process_group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self._core, self.loss_scaler = core, loss_scaler
        self.skips_overflow, self.reports_norm = skips_overflow, reports_norm
        self.dp_process_group = process_group
        self.external_loss_scale: float | None = None
        self.overflow = False
        self._global_grad_norm: float | None = None
        for mode in _MODES:
            if callable(change := getattr(self.optimizer, mode, None)):
                vars(self.optimizer)[mode] = partial(self._change_mode, mode, change)

    def _change_mode(self, mode: str, change: Callable[[], Any]) -> None:
        """In place of the optimizer's `train` or `eval`; see `ShardedOptimizer.change_mode`."""
        if mode != self.sharded.mode:
            self._core.require_subnetwork(f"optimizer.{mode}")
            self._core.barrier.wait(f"optimizer.{mode}")
            self.sharded.change_mode(mode, change)

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, if the optimizer has them."""
        if name in _MODES:
            return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sharded(self) -> ShardedOptimizer:
        return self._core.sharded

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.sharded.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.sharded.optimizer.param_groups

    @property
    def _coalesce_grad_reduction(self) -> bool:
        """Set by DeepSpeed's engine inside `coalesce_grad_reduction`."""
        return self.sharded.reducer.is_coalescing

    @_coalesce_grad_reduction.setter
    def _coalesce_grad_reduction(self, value: bool) -> None:
        self.sharded.reducer.is_coalescing = value

    @property
    def state(self) -> Any:
        return self.sharded.optimizer.state

    def step(self, closure: None = None) -> None:
        """Average and clip gradients, step, and all-gather the updated weights; collective.

        Raises:
            ValueError: a closure was passed.
        """
        if closure is not None:
            raise ValueError("step() takes no closure; call engine.backward(loss) before it")
        scale = self.loss_scale
        self.overflow = not self.sharded.step(scale, check_overflow=self.skips_overflow)
        self.loss_scaler.update_scale(self.overflow)
        if self.reports_norm:  # waits for the device
            self._global_grad_norm = math.inf if self.overflow else float(self.sharded.norm)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step. Collective where they have been averaged: at stage 2, with
        `overlap_comm` after the last micro-step, and once a full gradient was read or set.

        Raises:
            RuntimeError: a rank that must call it, too, continues training instead.
        """
        if self.sharded.reducer.is_averaged:
            self._core.barrier.wait("zero_grad")
        self.sharded.reducer.zero_grad()

    # ---- loss scale ---------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Factor by which losses are multiplied in the backward pass."""
        return self.loss_scaler.loss_scale if self.external_loss_scale is None else self.external_loss_scale

    cur_scale = loss_scale  # name in DeepSpeed's monitor

    def override_loss_scale(self, loss_scale: float) -> None:
        """As in DeepSpeed: use this loss scale from now on."""
        self.custom_loss_scaler, self.external_loss_scale = True, loss_scale

    def needs_scaler(self) -> bool:
        return bool(self.loss_scaler.dynamic or self.loss_scale != 1.0)

    # ---- methods that DeepSpeed's engine calls on ZeRO optimizers ------------------------------------------------

    def refresh_fp32_params(self) -> None:
        """Update fp32 masters after weights were changed from outside."""
        self.sharded.refresh_shards()

    def _nothing(self) -> None:
        """Does nothing: such calls concern DeepSpeed's own buffers and partitions."""

    finalize_gradient_accumulation_boundary = update_lp_params = empty_partition_cache = _nothing

    def offload_states(
        self, include: Container[OffloadStateTypeEnum] | None = None, *, pin_memory: bool = True, **_: Any
    ) -> None:
        """As in DeepSpeed, for masters and moments; weights and gradients stay on the device."""
        self.sharded.offload_states(
            states=include is None or OffloadStateTypeEnum.optim_states in include,
            masters=include is None or OffloadStateTypeEnum.hp_params in include,
            pin_memory=pin_memory,
        )

    def reload_states(self, **_: Any) -> None:
        self.sharded.reload_states()

    def state_dict(self) -> dict[str, Any]:
        """A placeholder that raises when read, since it would contain only this rank's share. Some hosts (Lightning)
        create a state dict, drop it, and save the engine's checkpoint."""
        return _NoState()

    def load_state_dict(self, state: Mapping[str, Any]) -> NoReturn:
        """Raises RuntimeError, with the methods to use."""
        _refuse_state()

    def destroy(self) -> None:
        for mode in _MODES:
            vars(self.optimizer).pop(mode, None)
        self.sharded.close()


def _refuse_state(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "SubnetworkOptimizer has no state dict of its own, since a rank owns only a share; use engine.save_checkpoint "
        "and engine.load_checkpoint"
    )


class _NoState(dict[str, Any]):
    """Raises when read, copied or pickled."""

    __getitem__ = __contains__ = __iter__ = __len__ = __reduce_ex__ = _refuse_state
    get = keys = values = items = pop = copy = _refuse_state
