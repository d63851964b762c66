"""Bytes and traffic of each rank, from a plan and dense shapes alone; and DESIGN.md's table of bytes per parameter.

Nothing is allocated and no torch is needed. `python -m sdp_deepspeed.estimate --ranks 8 --coverage 0.5` prints
the table. Left out because they do not grow with the model: optimizers' step counters, the scalars of the norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from sdp_deepspeed.plan import Plan
from sdp_deepspeed.segments import NOT_OPTIMIZED, Fragment, Segment, TensorInfo, build_segments

_FP32 = 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element.

    Args:
        weights: of the training dtype; the returning half of the exchange sends this.
        gradients: of local gradients between backward and step.
        wire: of gradients on the wire (`communication_data_type`).
        num_moments: fp32 moments per element: Adam 2; Lion, Adagrad, SGD with momentum 1; SGD 0.
    """

    weights: int
    gradients: int
    wire: int
    num_moments: int = 2

    @classmethod
    def of(
        cls,
        dtype: Literal["fp32", "bf16"],
        *,
        accumulate_in_fp32: bool = False,
        wire: int | None = None,
        moments: int = 2,
    ) -> Precision:
        """The precision of a dtype; `wire` None means that gradients travel in the dtype of the weights."""
        size = {"fp32": 4, "bf16": 2}[dtype]
        return cls(size, _FP32 if accumulate_in_fp32 else size, size if wire is None else wire, moments)

    def optimizer(self, *, master: bool) -> int:
        """Optimizer state per stepped element, with or without an fp32 master copy apart from the weights."""
        return _FP32 * (self.num_moments + master)


@dataclass(frozen=True)
class RankEstimate:
    """What one rank holds (bytes) and sends in one optimizer step (elements).

    Args:
        weights: parameters that it holds.
        gradients: of what it trains, at the end of backward.
        optimizer: moments, and the fp32 master where one is kept.
        step_gradients: fp32 averages of what it owns, alive during the step only.
        sent_gradients: elements sent towards owners.
        sent_back: elements sent back by owners: weights, at stage 0 averaged gradients.
        sent_bytes: both together.
    """

    weights: int
    gradients: int
    optimizer: int
    step_gradients: int
    sent_gradients: int
    sent_back: int
    sent_bytes: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state: the model state of DESIGN.md's table."""
        return self.weights + self.gradients + self.optimizer


def estimate(
    plan: Plan,
    tensors: Sequence[TensorInfo],
    *,
    stage: Literal[0, 1],
    precision: Precision,
    bucket_elements: int = 500_000_000,
) -> tuple[RankEstimate, ...]:
    """One estimate for each data-parallel rank, exact to the rounding of shards.

    Args:
        plan: who holds what.
        tensors: the dense model's tensors in model order; buffers are passed over.
        stage: ZeRO stage.
        precision: bytes per element.
        bucket_elements: DeepSpeed's `reduce_bucket_size`, which cuts segments.
    """
    parameters = [info for info in tensors if info.kind == "parameter"]
    run = _Run(
        segments=build_segments(parameters, plan, max_elements=bucket_elements),
        trained=frozenset(info.name for info in parameters if info.trainable),
        num_ranks=len(plan.subnetwork_of_rank),
        everyone_updates=plan.regime == "backward",
        stage=stage,
    )
    return tuple(_of_rank(run, rank, precision) for rank in range(run.num_ranks))


@dataclass(frozen=True)
class _Run:
    segments: Sequence[Segment]
    trained: frozenset[str]
    num_ranks: int
    everyone_updates: bool
    stage: int

    def num_receivers(self, segment: Segment) -> int:
        """Ranks that an owner sends its shard back to.

        In the backward regime all others, also at stage 0: the holders get averages, the rest weights.
        """
        return (self.num_ranks if self.everyone_updates else len(segment.holders)) - 1


def _of_rank(run: _Run, rank: int, precision: Precision) -> RankEstimate:
    held = [segment for segment in run.segments if segment.held_by(rank)]
    stepped = [segment for segment in held if segment.group != NOT_OPTIMIZED]
    shards = [segment.shard(rank) for segment in stepped]
    lengths = [stop - start for start, stop in shards]
    sent_gradients = sum(segment.num_elements - length for segment, length in zip(stepped, lengths, strict=True))
    sent_back = sum(run.num_receivers(segment) * length for segment, length in zip(stepped, lengths, strict=True))
    groups: dict[int, list[Fragment]] = {}
    for segment, shard in zip(stepped, shards, strict=True):
        groups.setdefault(segment.group, []).extend(segment.cut(*shard) if run.stage else segment.fragments)
    return RankEstimate(
        weights=sum(s.num_elements for s in (run.segments if run.everyone_updates else held)) * precision.weights,
        gradients=sum(_size(f) for s in held for f in s.fragments if f.piece.parameter in run.trained)
        * precision.gradients,
        optimizer=sum(_optimizer_bytes(fragments, precision) for fragments in groups.values()),
        step_gradients=sum(lengths) * _FP32,
        sent_gradients=sent_gradients,
        sent_back=sent_back,
        sent_bytes=sent_gradients * precision.wire + sent_back * precision.weights,
    )


def _size(fragment: Fragment) -> int:
    return fragment.stop - fragment.start


def _optimizer_bytes(fragments: Sequence[Fragment], precision: Precision) -> int:
    """State of one param group on one rank; fp32 weights are stepped in place, other weights keep a master."""
    return sum(map(_size, fragments)) * precision.optimizer(master=precision.weights != _FP32)


def plain(
    tensors: Sequence[TensorInfo], *, num_ranks: int, stage: Literal[0, 1], precision: Precision, alignment: int = 2
) -> RankEstimate:
    """The same figures for plain DeepSpeed; all ranks are alike.

    Args:
        num_ranks: n.
        alignment: stage 1 pads each param group to a multiple of n times this many elements (stock: 2).

    Stock stage 1 keeps an fp32 master for fp32 weights too. Traffic is the lower bound 2 (n-1) / n per element.
    """
    parameters = [info for info in tensors if info.kind == "parameter"]
    groups: dict[int, int] = {}
    for info in parameters:
        if info.group != NOT_OPTIMIZED:
            groups[info.group] = groups.get(info.group, 0) + prod(info.shape)
    whole = sum(prod(info.shape) for info in parameters)
    step = num_ranks * alignment if stage else 1
    padded = {group: -(-count // step) * step for group, count in groups.items()}
    stepped = sum(padded.values()) // (num_ranks if stage else 1)
    sent = sum(groups.values()) * (num_ranks - 1) // num_ranks
    master = stage == 1 or precision.weights != _FP32
    return RankEstimate(
        weights=(whole - sum(groups.values()) + sum(padded.values())) * precision.weights,
        gradients=sum(prod(info.shape) for info in parameters if info.trainable) * precision.gradients,
        optimizer=stepped * precision.optimizer(master=master),
        step_gradients=stepped * _FP32 if stage else 0,
        sent_gradients=sent,
        sent_back=sent,
        sent_bytes=sent * (precision.wire + precision.weights),
    )


def bytes_per_parameter(
    num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward"
) -> dict[str, tuple[float, float, float]]:
    """Weights, gradients and optimizer state per parameter of maskable units (DESIGN.md section 1).

    Args:
        num_ranks: n.
        coverage: C.
        precision: an fp32 master is counted unless the weights are fp32.
        regime: in the "backward" regime every rank has all weights.
    """
    n, c = num_ranks, coverage
    w, g, o = precision.weights, precision.gradients, precision.optimizer(master=precision.weights != _FP32)
    own = w if regime == "backward" else w * c
    return {
        "DDP / ZeRO-0": (w, g, o),
        "ZeRO-1": (w, g, o / n),
        "ZeRO-2": (w, g / n, o / n),
        "ZeRO-3, FSDP": (w / n, g / n, o / n),
        "SDP, stage 0": (own, g * c, o * c),
        "SDP + ZeRO-1": (own, g * c, o / n),
        "SDP + ZeRO-2": (own, g / n, o / n),
        "SDP + FSDP2": (w / n, g / n, o / n),
    }


def table(num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward") -> str:
    """`bytes_per_parameter` as markdown."""
    lines = [f"| n={num_ranks}, C={coverage:g} | weights | gradients | optimizer | sum |", "|---|---|---|---|---|"]
    for name, figures in bytes_per_parameter(num_ranks, coverage, precision, regime=regime).items():
        cells = " | ".join(f"{figure:.4g}" for figure in (*figures, sum(figures)))
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="bytes of model state per parameter of maskable units")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--regime", choices=["forward", "backward"], default="forward")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--accumulate-in-fp32", action="store_true")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or not 0 < options.coverage <= 1:
        parser.error(f"needs --ranks of 1 or more and 0 < --coverage <= 1, got {options.ranks}, {options.coverage}")
    precision = Precision.of(options.dtype, accumulate_in_fp32=options.accumulate_in_fp32)
    print(table(options.ranks, options.coverage, precision, regime=options.regime))


if __name__ == "__main__":
    main()
