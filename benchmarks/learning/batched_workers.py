"""All virtual workers at once, in one pass over the rows of all of them, for studies on one device.

Equal to `Reference`, which runs one worker after the other, but only as expensive as the method itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.learning.held_rows import HeldRows
from sdp_deepspeed.plan.plan import Plan
from tests.reference.virtual_workers import Reference, divisors


@dataclass(frozen=True)
class _Prepared:
    """State that depends on the plan and the rows.

    Args:
        rank_of_row: rank of each row of all micro-batches.
        divisors: number of holding ranks of each element.
    """

    plan: Plan
    rank_of_row: tuple[int, ...]
    rows: HeldRows
    divisors: dict[str, torch.Tensor]


@dataclass
class BatchedReference(Reference):
    """`Reference` in one forward and one backward pass.

    `loss_of` returns a loss for each row of a batch; the loss of a micro-batch is their mean. A micro-batch is a tensor
    with rows in dim 0, or a mapping to such tensors; all micro-batches of a step are concatenated. Random numbers, for
    example of dropout, are drawn for all rows together. Gradients are accumulated in the weights' dtype.

    Raises (by `step`):
        ValueError: the regime is "backward", the rows of the model depend on each other (batch norm, experts), or cut
            layers are not linear; use `Reference` for these.
    """

    _prepared: _Prepared | None = field(default=None, init=False, repr=False)

    def averaged_gradients(self, batches: Sequence[Sequence[Any]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        micro_batches = [micro for own in batches for micro in own]
        sizes = [_num_rows(micro) for micro in micro_batches]
        rank_of_row = [
            rank
            for rank, own in zip(self.ranks, batches, strict=True)
            for micro in own
            for _ in range(_num_rows(micro))
        ]
        prepared = self._prepare(tuple(rank_of_row))
        for parameter in self.weights.values():
            parameter.grad = None
        with prepared.rows.applied():
            of_rows = self.loss_of(self.model, _joined(micro_batches))
            losses = torch.stack([own.mean() for own in of_rows.split(sizes)])
            shares = losses.new_tensor([1 / len(own) for own in batches for _ in own])
            (losses * shares).sum().backward()
        rest = iter(losses.tolist())
        return [[next(rest) for _ in own] for own in batches], self._average(prepared.divisors)

    def _average(self, counts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum of all rows' gradients, divided by the number of holding ranks."""
        return {
            name: torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None
            else parameter.grad.float() / counts[name]
            for name, parameter in self.weights.items()
        }

    def _prepare(self, rank_of_row: tuple[int, ...]) -> _Prepared:
        """Recompute the state if the plan or the number of rows has changed."""
        kept = self._prepared
        if kept is None or kept.plan is not self.plan or kept.rank_of_row != rank_of_row:
            device = next(self.model.parameters()).device
            subnetworks = [self.plan.subnetwork_of_rank[rank] for rank in rank_of_row]
            of_row = torch.tensor(subnetworks, dtype=torch.long, device=device)
            rows = HeldRows.of(self.model, self.plan, of_row, is_scaled=self.is_scaled)
            kept = _Prepared(self.plan, rank_of_row, rows, divisors(self.model, self.plan, self.ranks))
            self._prepared = kept
        return kept


def _num_rows(batch: Any) -> int:
    return len(batch if isinstance(batch, torch.Tensor) else next(iter(batch.values())))


def _joined(batches: Sequence[Any]) -> Any:
    """Concatenate the rows of batches of the same structure."""
    if isinstance(batches[0], torch.Tensor):
        return torch.cat(list(batches))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
