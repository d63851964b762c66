"""Stochastic depth and dropout for the rivals of the image study."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout

from benchmarks.common.workers import Batch, Workers


class StochasticDepth:
    """Each worker leaves out residual branches at random, for all images of a step, and does not compute them. What the
    others add is divided by the probability that they run.

    Args:
        last: probability that the last branch is left out; that of the others grows linearly with depth.
    """

    def __init__(self, workers: Workers, last: float) -> None:
        names = [branch.bodies[0] for branch in workers.branches if branch.is_bypassed]
        self.rates = [last * (index + 1) / len(names) for index in range(len(names))]
        self.bodies = [[copy.get_submodule(name) for name in names] for copy in workers.copies]
        for bodies in self.bodies:
            for body, rate in zip(bodies, self.rates, strict=True):
                vars(body)["forward"] = partial(_gated, body, body.forward, 1 - rate)
        self.leave_out([[]] * len(self.bodies))

    def draw(self, seed: int) -> None:
        """Choose the branches of the next step."""
        random = torch.rand(len(self.bodies), len(self.rates), generator=torch.Generator().manual_seed(seed))
        is_dropped = random < torch.tensor(self.rates)
        self.leave_out([own.nonzero().flatten().tolist() for own in is_dropped])

    def leave_out(self, branches: Sequence[Sequence[int]]) -> None:
        """Choose the branches that each worker leaves out."""
        for bodies, dropped in zip(self.bodies, branches, strict=True):
            for index, body in enumerate(bodies):
                vars(body)["is_dropped"] = index in dropped

    def flops_per_image(self, workers: Workers, batch: Batch) -> float:
        """Expected value."""
        everything = workers.flops_per_image(batch)
        total = everything
        for index, rate in enumerate(self.rates):
            self.leave_out([[index]] * len(self.bodies))
            total -= rate * (everything - workers.flops_per_image(batch))
        self.leave_out([[]] * len(self.bodies))
        return total


def _gated(body: nn.Module, forward: Any, kept: float, stream: torch.Tensor) -> torch.Tensor:
    if body.is_dropped:
        return torch.zeros_like(stream)
    output: torch.Tensor = forward(stream) / kept
    return output


def add_dropout(workers: Workers, rate: float) -> None:
    """Dropout between the two convolutions of each residual branch."""
    for copy in workers.copies:
        for branch in workers.branches:
            first = copy.get_submodule(f"{branch.bodies[0]}.0")
            first.register_forward_hook(lambda module, _, output: dropout(output, rate, module.training))
