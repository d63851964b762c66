"""Dense models that leave out branches, or elements, at random while they train: stochastic depth, progressive layer
drop, branch dropout, dropout. Branches that are left out are not computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.reference.row_sites import Rows, SkippedRows

Kind = Literal["branch", "depth", "progressive"]


@dataclass(frozen=True)
class Dropping:
    """
    Args:
        rate: share of the rows that a branch is left out for: of all branches alike, of the last layer's, or of the
            last layer's in the end.
        kind: "branch": one rate for all branches. "depth": it grows with depth, from little to `rate` (stochastic
            depth). "progressive": as "depth", and it grows over the first steps from 0 (progressive layer drop).
        until: share of the run after which nothing is dropped.
    """

    rate: float
    kind: Kind = "branch"
    until: float = 1.0

    def of_layer(self, layer: int, depth: int, progress: float) -> float:
        """Its rate.

        Args:
            layer: from 0.
            progress: share of the run that is over.
        """
        if self.until <= progress < 1:
            return 0.0
        if self.kind == "branch":
            return self.rate
        now = self.rate if self.kind == "depth" else self.rate * (1 - math.exp(-10 * progress))
        return now * (layer + 1) / depth

    def mean(self, depth: int, progress: float) -> float:
        return sum(self.of_layer(layer, depth, progress) for layer in range(depth)) / depth


@contextmanager
def dropped(model: nn.Module, dropping: Dropping, progress: float, num_rows: int, seed: int) -> Iterator[None]:
    """Until the end of the block branches run for some of the rows, and count for more there, so that what they add is
    the same on average. Of each branch as many rows are left out as its rate says, rounded at random."""
    branches = list(locate_branches(model))
    layers = list(dict.fromkeys(branch.layer for branch in branches))
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for branch in branches:
            rate = dropping.of_layer(layers.index(branch.layer), len(layers), progress)
            order = torch.randperm(num_rows, generator=generator).to(device)  # drawn on the CPU, for all devices alike
            num_lacking = int(rate * num_rows + float(torch.rand((), generator=generator)))
            if num_lacking:
                modules = tuple(model.get_submodule(name) for name in branch.modules)
                _weigh(modules[-1], 1 / (1 - rate), stack)
                lacking, held = order[:num_lacking].sort().values, order[num_lacking:].sort().values
                SkippedRows(modules, Rows(held, lacking)).install(stack)
        yield


@contextmanager
def with_dropout(model: nn.Module, rate: float) -> Iterator[None]:
    """Until the end of the block elements of the embeddings, and of what each branch adds, are zero at random."""
    ends = [model.get_submodule(branch.modules[-1]) for branch in locate_branches(model)]
    with ExitStack() as stack:
        for module in [*ends, *(module for module in model.modules() if isinstance(module, nn.Embedding))]:
            stack.callback(module.register_forward_hook(partial(_drop_elements, rate)).remove)
        yield


def _drop_elements(rate: float, _: nn.Module, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (nn.functional.dropout(output[0], rate), *output[1:])
    return nn.functional.dropout(output, rate)


def _weigh(module: nn.Module, factor: float, stack: ExitStack) -> None:
    def scale(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * factor, *output[1:])
        return output * factor

    stack.callback(module.register_forward_hook(scale).remove)
