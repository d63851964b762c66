"""Bytes and traffic of each rank, from a plan and dense shapes alone; formulas.py has them per parameter.

Nothing is allocated. Left out because they do not grow with the model: optimizers' step
counters, the scalars of the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from sdp_deepspeed.estimate.precision import FP32_BYTES, Precision
from sdp_deepspeed.layout.buckets import Bucket, build_buckets, build_segments, default_bucket_elements
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.segments import Segment, padded
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo


@dataclass(frozen=True)
class Setup:
    """What decides a rank's bytes besides plan and shapes.

    Args:
        stage: ZeRO stage.
        precision: bytes per element.
        accumulation: micro-steps in an optimizer step; at stage 2 gradients are sent in each.
        offload: whether the optimizer's state is in host memory.
        bucket_elements: DeepSpeed's `reduce_bucket_size`, which cuts segments; None if the config has none.
        overlap: DeepSpeed's `overlap_comm`, with which two or more buckets are on their way.
        moments: by param group where it is not the precision's number: of Muon's two groups one has Adam's.
    """

    stage: Literal[0, 1, 2]
    precision: Precision
    accumulation: int = 1
    offload: bool = False
    bucket_elements: int | None = None
    overlap: bool = False
    moments: Mapping[int, int] = field(default_factory=dict)

    def optimizer(self, group: int) -> int:
        """Bytes of optimizer state per stepped element of a param group."""
        num_moments = self.moments.get(group, self.precision.num_moments)
        return replace(self.precision, num_moments=num_moments).optimizer(offload=self.offload)


@dataclass(frozen=True)
class RankEstimate:
    """What one rank holds (bytes) and sends in one optimizer step (elements).

    Args:
        weights: parameters that it holds.
        gradients: at the end of backward: of what it trains; at stage 2 averages of what it owns.
        optimizer: moments, and the fp32 master where one is kept; 0 if they are offloaded.
        host_optimizer: the same in host memory.
        step_gradients: fp32 gradients of what it steps that are made for the step and live no longer.
        sent_gradients: elements sent to owners.
        sent_back: elements sent back by owners: weights, at stage 0 averaged gradients.
        sent_bytes: both together.
        buffers: kept for what travels, at most, if ranks are on one node; of plain DeepSpeed's nothing is known (0).
        gathered: under FSDP2, copies of whole weights and gradients beside the shards, at the peak.
    """

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int
    step_gradients: int
    sent_gradients: int
    sent_back: int
    sent_bytes: int
    buffers: int = 0
    gathered: int = 0

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state on the device."""
        return self.weights + self.gradients + self.optimizer


def estimate(plan: Plan, tensors: Sequence[TensorInfo], setup: Setup) -> tuple[RankEstimate, ...]:
    """One estimate for each data-parallel rank, exact to the rounding of shards.

    Args:
        plan: who holds what; replicas of a subnetwork are holders like others.
        tensors: the dense model's tensors in model order; buffers are passed over.
    """
    parameters = [info for info in tensors if info.kind == "parameter"]
    limit = setup.bucket_elements or default_bucket_elements(parameters, plan)
    segments = build_segments(parameters, plan, max_elements=limit)
    all_receive_weights = plan.regime == "backward"
    nodes = Nodes.one(len(plan.subnetwork_of_rank))
    sent = [segment for segment in segments if segment.group != NOT_OPTIMIZED]
    run = _Run(
        setup=setup,
        segments=segments,
        buckets=build_buckets(sent, nodes, max_elements=limit, all_receive_weights=all_receive_weights),
        trained=frozenset(info.name for info in parameters if info.trainable),
        num_ranks=len(plan.subnetwork_of_rank),
        all_receive_weights=all_receive_weights,
    )
    return tuple(_of_rank(run, rank) for rank in range(run.num_ranks))


@dataclass(frozen=True)
class _Run:
    setup: Setup
    segments: Sequence[Segment]
    buckets: Sequence[Bucket]
    trained: frozenset[str]
    num_ranks: int
    all_receive_weights: bool

    def num_receivers(self, segment: Segment) -> int:
        """Ranks that an owner sends its shard back to.

        In the backward regime all others, also at stage 0: the holders get averages, the rest weights.
        """
        return (self.num_ranks if self.all_receive_weights else len(segment.holders)) - 1

    def num_trained(self, segment: Segment) -> int:
        return sum(f.stop - f.start for f in segment.fragments if f.piece.parameter in self.trained)


def _of_rank(run: _Run, rank: int) -> RankEstimate:
    setup, precision = run.setup, run.setup.precision
    held = [segment for segment in run.segments if segment.held_by(rank)]
    averaged = [segment for segment in held if segment.group != NOT_OPTIMIZED]
    lengths = [stop - start for start, stop in (segment.owned_range(rank) for segment in averaged)]
    steps = lengths if setup.stage else [segment.num_elements for segment in averaged]
    stepped = sum(steps)
    rounds = setup.accumulation if setup.stage == 2 else 1
    sent_gradients = rounds * (sum(segment.num_elements for segment in averaged) - sum(lengths))
    sent_back = sum(run.num_receivers(segment) * length for segment, length in zip(averaged, lengths, strict=True))
    state = sum(count * setup.optimizer(segment.group) for segment, count in zip(averaged, steps, strict=True))
    return RankEstimate(
        weights=sum(s.num_elements for s in (run.segments if run.all_receive_weights else held)) * precision.weights,
        gradients=_gradients(run, held, stepped),
        optimizer=0 if setup.offload else state,
        host_optimizer=state if setup.offload else 0,
        step_gradients=_step_gradients(setup, stepped),
        sent_gradients=sent_gradients,
        sent_back=sent_back,
        sent_bytes=sent_gradients * precision.wire + sent_back * precision.weights,
        buffers=_buffers(run, rank),
    )


def _buffers(run: _Run, rank: int) -> int:
    """Bytes of what leaves, what arrives, and averages where they do not stay; of one bucket or, where others overlap
    with each of its collectives, of several."""
    sizes = [_buffer_sizes(run, bucket, rank) for bucket in run.buckets]
    travels, averages = (max(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    num_buckets = 1 + run.setup.overlap * (1 if run.setup.stage else 2)
    return (2 * travels + averages * (run.setup.stage != 1)) * num_buckets


def _buffer_sizes(run: _Run, bucket: Bucket, rank: int) -> tuple[int, int]:
    """Bytes of the larger of what leaves and what arrives, there and back; of averages."""
    owned = held = contributions = sent_back = come_back = 0
    for segment in bucket.segments:
        start, stop = segment.owned_range(rank)
        owned += stop - start
        held += segment.num_elements * segment.held_by(rank)
        contributions += (stop - start) * (len(segment.holders) - 1)
        sent_back += (stop - start) * run.num_receivers(segment)
        come_back += segment.num_elements * (segment.held_by(rank) or run.all_receive_weights)
    padding = run.num_ranks * (padded(1) - 1) * bucket.has_large_shards
    there = (max(held - owned, contributions) + padding) * run.setup.precision.wire
    back = (max(sent_back, come_back - owned) + padding) * run.setup.precision.weights
    return max(there, back), owned * FP32_BYTES


def _gradients(run: _Run, held: Sequence[Segment], stepped: int) -> int:
    """Bytes at the end of backward; what no optimizer steps stays in `param.grad` at every stage."""
    precision = run.setup.precision
    if run.setup.stage < 2:
        return sum(map(run.num_trained, held)) * precision.gradients
    left = sum(run.num_trained(segment) for segment in held if segment.group == NOT_OPTIMIZED)
    return stepped * precision.gradients + left * precision.weights


def _step_gradients(setup: Setup, stepped: int) -> int:
    """Bytes of fp32 gradients that exist during the step only."""
    there = FP32_BYTES in (setup.precision.weights, setup.precision.gradients)
    kept = setup.precision.weights == FP32_BYTES if setup.stage == 0 else setup.stage == 2 and there
    return 0 if kept else stepped * FP32_BYTES


def plain(tensors: Sequence[TensorInfo], setup: Setup, *, num_ranks: int, alignment: int = 2) -> RankEstimate:
    """The same figures for plain DeepSpeed; all ranks are alike.

    Args:
        num_ranks: n.
        alignment: stages 1 and 2 pad each param group to a multiple of n times this many elements (stock: 2).

    Stock stages 1 and 2 keep an fp32 master for fp32 weights too, and a gradient that straddles two ranks' shards is
    kept whole by both (left out here). Traffic is the lower bound 2 (n-1) / n per element.
    """
    stage, precision = setup.stage, setup.precision
    parameters = [info for info in tensors if info.kind == "parameter"]
    groups: dict[int, int] = {}
    for info in parameters:
        if info.group != NOT_OPTIMIZED:
            groups[info.group] = groups.get(info.group, 0) + prod(info.shape)
    whole, optimized = sum(prod(info.shape) for info in parameters), sum(groups.values())
    trained = sum(prod(info.shape) for info in parameters if info.trainable)
    step = num_ranks * alignment if stage else 1
    padded = sum(-(-count // step) * step for count in groups.values())
    stepped = padded // (num_ranks if stage else 1)
    sent = optimized * (num_ranks - 1) // num_ranks
    state = stepped * precision.optimizer(offload=stage > 0)  # a master in any precision
    rounds = setup.accumulation if stage == 2 else 1
    return RankEstimate(
        weights=(whole - optimized + padded) * precision.weights,
        gradients=(trained if stage < 2 else trained - optimized + stepped) * precision.gradients,
        optimizer=0 if setup.offload else state,
        host_optimizer=state if setup.offload else 0,
        step_gradients=stepped * FP32_BYTES if stage else 0,
        sent_gradients=rounds * sent,
        sent_back=sent,
        sent_bytes=sent * (rounds * precision.wire + precision.weights),
    )
