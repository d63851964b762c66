"""DeepSpeed's schedules of the learning rate, for `--host fsdp2`: the same rate in each step, the same saved state.

Written anew because DeepSpeed may not be there, and because no schedule of torch or Transformers is the same function:
DeepSpeed's begin with two steps at their lowest rate, warm up by a logarithm unless told otherwise, and end a step
early. The state is DeepSpeed's too, so that a run of one host goes on under the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sdp_deepspeed.messages import did_you_mean

if TYPE_CHECKING:
    import torch


class Rates(Protocol):
    """A rate by step."""

    def rate(self, step: int, base: float) -> float:
        """
        Args:
            step: -1 before the first one of the optimizer, 0 after it.
            base: the optimizer's own rate.
        """


@dataclass(frozen=True, kw_only=True)
class _Warmup:
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def part(self, step: int) -> float | None:
        """How far a warm-up is, from 0 to 1; None when it is over."""
        steps = max(2, self.warmup_num_steps)
        if step >= steps:
            return None
        return step / steps if self.warmup_type == "linear" else 1.0 / math.log(steps) * math.log(step + 1)


@dataclass(frozen=True, kw_only=True)
class WarmupRates(_Warmup):
    """`WarmupLR`: from one rate to another, then that."""

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None

    def rate(self, step: int, base: float) -> float:
        if step < 0:
            return self.warmup_min_lr
        highest = base if self.warmup_max_lr is None else self.warmup_max_lr
        part = self.part(step)
        return self.warmup_min_lr + (highest - self.warmup_min_lr) * (self.after(step) if part is None else part)

    def after(self, step: int) -> float:
        """As `part`, when the warm-up is over."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayRates(WarmupRates):
    """`WarmupDecayLR`: then down to the first one, in a line."""

    total_num_steps: int
    warmup_max_lr: float | None = 0.001

    def after(self, step: int) -> float:
        length = max(1.0, self.total_num_steps - max(2, self.warmup_num_steps))
        return max(0.0, float(self.total_num_steps - step) / float(length))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineRates(_Warmup):
    """`WarmupCosineLR`: shares of the optimizer's own rate, up and then down by a cosine."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def rate(self, step: int, base: float) -> float:
        return base * self._ratio(step) if step >= 0 else 0.0

    def _ratio(self, step: int) -> float:
        part = self.part(step)
        if part is not None:
            return self.warmup_min_ratio + part * (1.0 - self.warmup_min_ratio)
        warmup = max(2, self.warmup_num_steps)
        progress = min(1.0, (step - warmup + 1) / max(1, self.total_num_steps - warmup))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


_KINDS: dict[str, type[Any]] = {
    "WarmupLR": WarmupRates,
    "WarmupDecayLR": WarmupDecayRates,
    "WarmupCosineLR": WarmupCosineRates,
}
_COUNTS = ("total_num_steps", "warmup_num_steps")


def rates_of(section: Mapping[str, Any]) -> Rates | None:
    """
    Args:
        section: `scheduler` of a DeepSpeed config; nothing in it for none.

    Raises:
        ValueError: another schedule, or parameters that it does not have.
    """
    if not section or section.get("type") is None:
        return None
    name, params = section["type"], dict(section.get("params") or {})
    if name not in _KINDS:
        raise ValueError(f"scheduler.type: got {name!r}, expected one of {', '.join(_KINDS)}")
    known = {field.name: field for field in fields(_KINDS[name])}
    for key, value in params.items():
        if key not in known:
            raise ValueError(f"scheduler.params.{key}: {name} here: {did_you_mean(key, known)}")
        _check(f"scheduler.params.{key}", key, value)
    if "total_num_steps" in known and "total_num_steps" not in params:
        raise ValueError(f'scheduler.params.total_num_steps: {name} needs it; "auto" is --steps')
    rates: Rates = _KINDS[name](**params)
    return rates


def _check(path: str, key: str, value: Any) -> None:
    if key == "warmup_type":
        if value not in ("log", "linear"):
            raise ValueError(f'{path}: got {value!r}, expected "log" or "linear"')
    elif key in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: got {value!r}, expected a whole number of at least 1")
    elif not (key == "warmup_max_lr" and value is None) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{path}: got {value!r}, expected a number")


class RateSchedule:
    """Sets the rate of an optimizer, now and after each of its steps.

    Args:
        optimizer: its groups have their own rates still.
    """

    KEPT: ClassVar[str] = "last_batch_iteration"  # by DeepSpeed

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        self._optimizer, self._rates = optimizer, rates
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = -1
        self._set()

    def step(self) -> None:
        """After one of the optimizer."""
        self._step += 1
        self._set()

    def state_dict(self) -> dict[str, int]:
        return {self.KEPT: self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step = state[self.KEPT]
        self._set()

    def _set(self) -> None:
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            group["lr"] = self._rates.rate(self._step, base)
