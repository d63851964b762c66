"""Dense models that drop branches, or elements, at random while they train. Dropped branches are not computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.learning.row_sites import Rows, SkippedRows
from sdp_deepspeed.masking.proof import proven_branches


@dataclass(frozen=True)
class Dropping:
    """
    Args:
        rate: share of the rows for which a branch is dropped: of all branches, or of the last layer's.
        kind: "branch": one rate for all branches. "depth": it grows with depth (stochastic depth).
    """

    rate: float
    kind: Literal["branch", "depth"] = "branch"

    def of_layer(self, layer: int, depth: int) -> float:
        """The rate of a layer, counted from 0."""
        return self.rate if self.kind == "branch" else self.rate * (layer + 1) / depth

    def mean(self, depth: int) -> float:
        return sum(self.of_layer(layer, depth) for layer in range(depth)) / depth


@contextmanager
def dropped(model: nn.Module, dropping: Dropping, num_rows: int, seed: int) -> Iterator[None]:
    """In the block branches run for some of the rows, and what they add there is scaled up, so that its mean stays. Of
    each branch as many rows are dropped as its rate says, rounded at random."""
    branches = list(proven_branches(model))
    layers = list(dict.fromkeys(branch.layer for branch in branches))
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for branch in branches:
            rate = dropping.of_layer(layers.index(branch.layer), len(layers))
            order = torch.randperm(num_rows, generator=generator).to(device)  # drawn on the CPU, for all devices alike
            num_dropped = int(rate * num_rows + float(torch.rand((), generator=generator)))
            if num_dropped:
                modules = tuple(model.get_submodule(name) for name in branch.modules)
                _on_output(modules[-1], partial(torch.mul, other=1 / (1 - rate)), stack)
                absent, held = order[:num_dropped].sort().values, order[num_dropped:].sort().values
                SkippedRows(modules, Rows(held, absent)).install(stack)
        yield


@contextmanager
def with_dropout(model: nn.Module, rate: float) -> Iterator[None]:
    """In the block elements of the embeddings, and of what each branch adds, are zero at random."""
    ends = [model.get_submodule(branch.modules[-1]) for branch in proven_branches(model)]
    with ExitStack() as stack:
        for module in [*ends, *(module for module in model.modules() if isinstance(module, nn.Embedding))]:
            _on_output(module, partial(nn.functional.dropout, p=rate), stack)
        yield


def _on_output(module: nn.Module, change: Any, stack: ExitStack) -> None:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    stack.callback(module.register_forward_hook(hook).remove)
