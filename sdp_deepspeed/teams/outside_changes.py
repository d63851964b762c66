"""Changes of weights from outside: by other than the optimizer, between a team's step and the next of the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OutsideChanges:
    """Compares the sum of each weight after a step of the team with that before the next step of an optimizer.

    A change would be averaged with the weights of other teams, unseen. Sums are compared on the device, so that nothing
    waits for them; `found` does. After the first step of any optimizer in the process, also of another model, changes
    are not seen until the team's next step.

    Args:
        weights: returns local tensors of the weights that this rank has; nothing while they are others'.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._before = torch.empty(0)
        self._changed = torch.tensor(False)
        reference = weakref.ref(self)

        def compare(*_: Any) -> None:
            if (changes := reference()) is not None:
                changes._compare()

        weakref.finalize(self, register_optimizer_step_pre_hook(compare).remove)

    def note(self) -> None:
        """Weights may have changed until now, and may not until the next step of an optimizer."""
        self._before = self._sums()

    def found(self) -> bool:
        """Whether weights of this rank were changed."""
        return bool(self._changed)

    def _compare(self) -> None:
        if len(self._before) and len(now := self._sums()):
            self._changed = self._changed.to(now.device) | (self._before != now).any()
            self._before = torch.empty(0)

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        sums = [weight.sum(dtype=torch.float32) for weight in self._weights()]
        return torch.stack([value.to(sums[0].device) for value in sums]) if sums else torch.empty(0)
