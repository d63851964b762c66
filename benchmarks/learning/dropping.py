"""Dropout and stochastic depth for the rivals of the learning study."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout

from sdp_deepspeed.architectures import LocatedBranch


def add_dropout(models: Sequence[nn.Module], branches: Sequence[LocatedBranch], rate: float) -> None:
    """Dropout on what each branch adds, as in the first Transformers."""
    for model in models:
        for branch in branches:
            model.get_submodule(branch.modules[-1]).register_forward_hook(partial(_drop_elements, rate))


def _drop_elements(rate: float, module: nn.Module, _: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (dropout(output[0], rate, module.training), *output[1:])
    return dropout(output, rate, module.training)


class BranchDropout:
    """What branches add is zero for some of a worker's rows, and scaled up for the others, so that its mean stays.
    Operations of dropped rows do not count (plans.py), though they are computed here.

    Args:
        models: of the workers, which have equal numbers of rows.
        rate: share of the rows for which each branch is dropped.
    """

    def __init__(self, models: Sequence[nn.Module], branches: Sequence[LocatedBranch], rate: float) -> None:
        self.rate, self.num_workers, self.num_branches = rate, len(models), len(branches)
        self.factors: list[list[torch.Tensor]] = []  # of each branch and worker, [rows]
        for worker, model in enumerate(models):
            for index, branch in enumerate(branches):
                self._scale_rows(model.get_submodule(branch.modules[-1]), index, worker)

    def draw(self, num_rows: int, seed: int) -> None:
        """Choose the rows of the next step: of each branch as many as the rate says, rounded at random.

        Args:
            num_rows: of all workers.
        """
        generator = torch.Generator().manual_seed(seed)
        self.factors.clear()
        for _ in range(self.num_branches):
            order = torch.randperm(num_rows, generator=generator)
            num_dropped = int(self.rate * num_rows + float(torch.rand((), generator=generator)))
            factors = torch.full((num_rows,), 1 / (1 - self.rate))
            factors[order[:num_dropped]] = 0
            self.factors.append(list(factors.chunk(self.num_workers)))

    def _scale_rows(self, module: nn.Module, branch: int, worker: int) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            added = output[0] if isinstance(output, tuple) else output
            added = added * self.factors[branch][worker].view(-1, 1, 1)
            return (added, *output[1:]) if isinstance(output, tuple) else added

        module.register_forward_hook(hook)
