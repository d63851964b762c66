"""What the phases of a schedule take, as a table for the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import torch

from sdp_deepspeed.engine.apply_plan import ChosenPlan
from sdp_deepspeed.estimate.per_rank import RankEstimate, Setup, estimate
from sdp_deepspeed.estimate.precision import FP32_BYTES, Precision, num_moments
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.schedule import Phase
from sdp_deepspeed.sizes import mib_text

_TITLES = (*("steps", "coverage", "mode", "ZeRO", "micro-batch", "model state", "sent per step", "FLOPs of units"),)


@dataclass(frozen=True)
class PhaseRow:
    """
    Args:
        phase: when.
        plan: who holds what.
        coverage: C, weighted by FLOPs.
        flops: of each subnetwork, share of the units' FLOPs that plain data parallelism would do.
        ranks: bytes of each data-parallel rank, by formula.
        batches: samples of a micro-batch, and micro-steps.
        stage: ZeRO's.
    """

    phase: Phase
    plan: Plan
    coverage: float
    flops: tuple[float, ...]
    ranks: tuple[RankEstimate, ...]
    batches: tuple[int, int]
    stage: int

    @classmethod
    def of(
        cls, phase: Phase, chosen: ChosenPlan, tensors: Sequence[TensorInfo], setup: Setup, batches: tuple[int, int]
    ) -> PhaseRow:
        """
        Args:
            chosen: in the coordinates of this rank's tensors.
            tensors: the module's, whole, with their param groups.
        """
        plan, flops = chosen.plan, [cost.flops for cost in chosen.costs]
        shares, ranks = _flops_shares(plan, flops), estimate(plan, tensors, setup)
        return cls(phase, plan, chosen.coverage, shares, ranks, batches, setup.stage)

    @property
    def states(self) -> tuple[int, ...]:
        """Of each rank, bytes of weights and optimizer: what there is between steps."""
        return tuple(rank.weights + rank.optimizer for rank in self.ranks)

    def refuse_too_large(self, memory: int | None) -> None:
        """
        Args:
            memory: bytes of the device; None if nobody knows.

        Raises:
            ValueError: model state and buffers alone do not fit.
        """
        needed = max(rank.state + rank.buffers + rank.step_gradients for rank in self.ranks)
        if memory is not None and needed > memory:
            raise ValueError(
                f"its model state and buffers take {mib_text(needed, digits=0)} on a rank, more than the "
                f"{mib_text(memory, digits=0)} of its GPU, without activations: take less coverage, or a higher stage"
            )

    def cells(self) -> list[str]:
        """By _TITLES."""
        last = "the end" if self.phase.until_step is None else f"{self.phase.until_step}"
        strategy = self.plan.strategy if isinstance(self.plan.strategy, str) else "mixed"
        return [
            f"{self.phase.first_step} to {last}",
            f"{self.coverage:.4g}",
            f"{self.plan.regime} x {strategy}",
            f"{self.stage}",
            f"{self.batches[0]} x {self.batches[1]}",
            _range([rank.state for rank in self.ranks], mib_text) + self._beside(),
            _range([rank.sent_bytes for rank in self.ranks], mib_text),
            _range(self.flops, "{:.2f}x".format),
        ]

    def _beside(self) -> str:
        beside = [rank.host_optimizer for rank in self.ranks]
        return f" and {_range(beside, mib_text)} of its host" if any(beside) else ""


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Of all ranks: one text where theirs are alike."""
    return " to ".join(dict.fromkeys((text(min(values)), text(max(values)))))


def _flops_shares(plan: Plan, flops: Sequence[int]) -> tuple[float, ...]:
    """A backward worker runs all, and leaves out weight gradients: a third."""
    loads = [sum(flops[unit] for unit in plan.units_of(k)) for k in range(plan.num_subnetworks)]
    shares = [load / sum(flops) if any(flops) else 1.0 for load in loads]
    return tuple(share if plan.regime == "forward" else (2 + share) / 3 for share in shares)


def setup_of(
    settings: OptimizerSettings, dtype: torch.dtype, optimizer: torch.optim.Optimizer, accumulation: int
) -> Setup:
    """What decides bytes, as an engine has it.

    Args:
        dtype: of the weights.
        optimizer: the wrapped one.
        accumulation: micro-steps.
    """
    gradients = FP32_BYTES if settings.accumulate_in_fp32 else dtype.itemsize
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    moments = num_moments(type(optimizer).__name__, has_momentum=has_momentum)
    return Setup(
        stage=cast(Literal[0, 1, 2], settings.stage),
        precision=Precision(dtype.itemsize, gradients, settings.wire_dtype.itemsize, moments),
        accumulation=accumulation,
        offload=settings.offload is not None,
        bucket_elements=settings.bucket_elements,
        overlap=settings.max_in_flight > 0,
    )


def schedule_table(rows: Sequence[PhaseRow], redraw_interval: int | None, memory: int | None = None) -> str:
    """Text to print: a line for each phase, and what a rank has at most while the plan changes.

    Args:
        memory: bytes of a rank's device; None if nobody knows.
    """
    lines = [_TITLES, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    title = "phases of the schedule; of each worker, by formula (activations not counted)"
    draws = [] if redraw_interval is None else [f"another assignment is drawn every {redraw_interval} steps"]
    turns = [*pairwise(rows), *((row, row) for row in rows if redraw_interval is not None and not row.plan.is_whole)]
    most = max((sum(both) for one, other in turns for both in zip(one.states, other.states, strict=True)), default=0)
    too_much = " (more than its GPU has: it may end there)" if memory is not None and most > memory else ""
    moves = [f"while the plan changes: at most {mib_text(most)}, both states{too_much}, and two buckets"] * bool(turns)
    return "\n  ".join([title, *(text.rstrip() for text in texts), *moves, *draws])
