"""Bytes and traffic of each rank, from a plan and dense shapes alone; formulas.py has them per parameter.

Nothing is allocated. Left out because they do not grow with the model: optimizers' step
counters, the scalars of the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from sdp_deepspeed.estimate.precision import FP32_BYTES, Precision
from sdp_deepspeed.parallel.buckets import BucketLayout, plan_buckets
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo, pieces_by_tensor

DEFAULT_BUCKET = 50_000_000  # elements, the engine's (engine/settings.py)


@dataclass(frozen=True)
class Setup:
    """What decides a rank's bytes besides plan and shapes.

    Args:
        stage: ZeRO stage.
        precision: bytes per element.
        accumulation: micro-steps in an optimizer step; at stage 2 gradients are sent in each.
        offload: whether the optimizer's state is in host memory.
        bucket_elements: DeepSpeed's `reduce_bucket_size`; None if the config has none.
        moments: by param group where it is not the precision's number: of Muon's two groups one has Adam's.
    """

    stage: Literal[0, 1, 2]
    precision: Precision
    accumulation: int = 1
    offload: bool = False
    bucket_elements: int | None = None
    moments: Mapping[int, int] = field(default_factory=dict)

    def moment_bytes(self, group: int) -> int:
        """Of each element that is stepped in a param group."""
        return FP32_BYTES * self.moments.get(group, self.precision.num_moments)


@dataclass(frozen=True)
class RankEstimate:
    """What one rank holds (bytes) and sends in one optimizer step (elements).

    Args:
        weights: parameters that it holds.
        gradients: at the end of backward: of what it trains; at stage 2 fp32 averages of what it owns.
        optimizer: moments, and the fp32 master where one is kept; 0 if they are offloaded.
        host_optimizer: the same in host memory, with a gradient.
        step_gradients: fp32 gradients of what it steps that are made for the step and live no longer.
        sent_gradients: elements sent to owners.
        sent_back: elements sent back by owners: weights, at stage 0 averaged gradients.
        sent_bytes: both together.
        buffers: flat ones that buckets have by turns; of plain DeepSpeed's nothing is known (0).
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


def buckets_of(plan: Plan, tensors: Sequence[TensorInfo], bucket_size: int) -> list[BucketLayout]:
    """The engine's buckets.

    Args:
        tensors: the dense model's parameters in model order.
        bucket_size: elements that a rank holds of one depth range, at most.
    """
    trained = [info for info in tensors if info.group != NOT_OPTIMIZED]
    pieces = pieces_by_tensor(trained, plan)
    return plan_buckets(
        {info.name: pieces["parameter", info.name] for info in trained},
        {info.name: info.shape for info in trained},
        {info.name: info.dtype for info in trained},
        {info.name: info.group for info in trained},
        bucket_size=bucket_size,
        stepped_whole=[info.name for info in trained if info.is_whole],
    )


def estimate(plan: Plan, tensors: Sequence[TensorInfo], setup: Setup) -> tuple[RankEstimate, ...]:
    """One estimate for each data-parallel rank.

    Args:
        plan: who holds what; replicas of a subnetwork are holders like others.
        tensors: the dense model's tensors in model order; buffers are passed over.
    """
    parameters = [info for info in tensors if info.kind == "parameter"]
    run = _Run(setup, plan, tuple(buckets_of(plan, parameters, setup.bucket_elements or DEFAULT_BUCKET)))
    others = [info for info in parameters if info.group == NOT_OPTIMIZED]
    return tuple(_of_rank(run, others, rank) for rank in range(run.num_ranks))


@dataclass(frozen=True)
class _Run:
    setup: Setup
    plan: Plan
    buckets: tuple[BucketLayout, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.plan.subnetwork_of_rank)

    @property
    def all_receive_weights(self) -> bool:
        return self.plan.regime == "backward"

    @property
    def sums_elsewhere(self) -> bool:
        """Whether gradients are summed in another dtype than that of the weights."""
        return self.setup.precision.gradients != self.setup.precision.weights

    def keeps_gradients(self, bucket: BucketLayout) -> bool:
        """Whether a bucket has a gradient buffer of its own."""
        return self.setup.stage == 0 or (self.setup.stage == 1 and (bucket.is_whole or self.sums_elsewhere))


def _owned(bucket: BucketLayout, rank: int) -> int:
    """Elements of a rank's shard, with padding."""
    if rank not in bucket.holders:
        return 0
    start, stop = bucket.shard_range(bucket.holders.index(rank))
    return stop - start


def _of_rank(run: _Run, others: Sequence[TensorInfo], rank: int) -> RankEstimate:
    setup, precision = run.setup, run.setup.precision
    held = [bucket for bucket in run.buckets if rank in bucket.holders]
    steps = [bucket.size if setup.stage == 0 else _owned(bucket, rank) for bucket in held]
    stepped = sum(steps)
    left = _held_elements(run, others, rank)
    state = 0
    for bucket, count in zip(held, steps, strict=True):
        is_stepped_in_place = bucket.is_whole and precision.weights == FP32_BYTES and not setup.offload
        state += count * (setup.moment_bytes(bucket.param_group) + FP32_BYTES * (not is_stepped_in_place))
    sent_gradients, sent_averages, sent_weights = _sent(run, held, rank)
    stored = run.buckets if run.all_receive_weights else held
    return RankEstimate(
        weights=(sum(b.size if b.is_whole else b.num_elements for b in stored) + left) * precision.weights,
        gradients=_gradients(run, held, stepped, _held_elements(run, [i for i in others if i.trainable], rank)),
        optimizer=0 if setup.offload else state,
        host_optimizer=state + stepped * FP32_BYTES if setup.offload else 0,
        step_gradients=_step_gradients(run, held, steps),
        sent_gradients=sent_gradients,
        sent_back=sent_averages + sent_weights,
        sent_bytes=(sent_gradients + sent_averages) * precision.wire + sent_weights * precision.weights,
        buffers=_buffers(run, held),
    )


def _held_elements(run: _Run, tensors: Sequence[TensorInfo], rank: int) -> int:
    """Of tensors in no bucket, what a rank stores."""
    pieces = pieces_by_tensor(tensors, run.plan)
    shapes = {info.name: info.shape for info in tensors}
    return sum(
        piece.num_elements(shapes[name])
        for (_, name), found in pieces.items()
        for piece, ranks in found
        if run.all_receive_weights or rank in ranks
    )


def _gradients(run: _Run, held: Sequence[BucketLayout], stepped: int, left: int) -> int:
    """Bytes at the end of backward; what no optimizer steps stays in `.grad` at every stage.

    Args:
        stepped: elements.
        left: trainable elements that are in no bucket.
    """
    precision = run.setup.precision
    if run.setup.stage == 2:
        return (0 if run.setup.offload else stepped * FP32_BYTES) + left * precision.weights
    own = sum(bucket.size for bucket in held if run.keeps_gradients(bucket))
    waiting = sum(b.num_elements for b in held if not b.is_whole and not run.sums_elsewhere)  # in `.grad`
    return (own + waiting) * precision.gradients + left * precision.weights


def _step_gradients(run: _Run, held: Sequence[BucketLayout], steps: Sequence[int]) -> int:
    """Bytes of fp32 averages that exist during the step only."""
    setup = run.setup
    if setup.stage == 2:
        return 0
    made = [
        count * FP32_BYTES
        for bucket, count in zip(held, steps, strict=True)
        if not run.keeps_gradients(bucket) or setup.precision.gradients != FP32_BYTES
    ]
    return max(made, default=0) if setup.offload else sum(made)


def _buffers(run: _Run, held: Sequence[BucketLayout]) -> int:
    """Bytes of flat buffers that buckets have by turns: weights of cut tensors, gradients that wait in `.grad`, what is
    sent in a dtype of its own, and in the backward regime what all ranks return."""
    precision = run.setup.precision
    stored = run.buckets if run.all_receive_weights else held
    sizes: dict[int, int] = {}  # elements by bytes of an element, for the dtype decides which buffer it is
    for bucket in stored:
        if not bucket.is_whole:
            sizes[precision.weights] = max(sizes.get(precision.weights, 0), bucket.size)
    for bucket in held:
        if not run.keeps_gradients(bucket):
            sizes[precision.gradients] = max(sizes.get(precision.gradients, 0), bucket.size)
    result = sum(width * size for width, size in sizes.items())
    if precision.wire != precision.gradients:
        result += precision.wire * max((bucket.size for bucket in held), default=0)
    returned = [run.num_ranks * most for most in _returned(run)] if run.all_receive_weights else []
    return result + precision.weights * max(returned, default=0)


def _returned(run: _Run) -> list[int]:
    """In the backward regime, for each depth range elements that each rank sends to all."""
    counts: dict[int, list[int]] = {}
    for bucket in run.buckets:
        if run.setup.stage > 0 or len(bucket.holders) < run.num_ranks:
            ranks = counts.setdefault(bucket.depth_range, [0] * run.num_ranks)
            for rank in bucket.holders:
                ranks[rank] += _owned(bucket, rank)
    return [max(ranks) for ranks in counts.values()]


def _sent(run: _Run, held: Sequence[BucketLayout], rank: int) -> tuple[int, int, int]:
    """Elements of gradients, of averages that return (stage 0), and of weights that do."""
    gradients = sum(bucket.size - _owned(bucket, rank) for bucket in held)
    to_holders = sum((len(bucket.holders) - 1) * _owned(bucket, rank) for bucket in held)
    if run.setup.stage == 2:
        gradients *= run.setup.accumulation
    weights = 0 if run.setup.stage == 0 else to_holders
    if run.all_receive_weights:
        weights = sum((run.num_ranks - 1) * most for most in _returned(run))
    return gradients, to_holders if run.setup.stage == 0 else 0, weights


def plain(tensors: Sequence[TensorInfo], setup: Setup, *, num_ranks: int) -> RankEstimate:
    """The same figures for plain DeepSpeed; all ranks are alike.

    Args:
        num_ranks: n.

    Stock stages 1 and 2 pad each param group to a multiple of 2n elements and keep an fp32 master for fp32 weights too;
    a gradient that straddles two ranks' shards is kept whole by both (left out here). Traffic is the lower bound
    2 (n-1) / n per element.
    """
    stage, precision = setup.stage, setup.precision
    parameters = [info for info in tensors if info.kind == "parameter"]
    groups: dict[int, int] = {}
    for info in parameters:
        if info.group != NOT_OPTIMIZED:
            groups[info.group] = groups.get(info.group, 0) + prod(info.shape)
    whole, optimized = sum(prod(info.shape) for info in parameters), sum(groups.values())
    trained = sum(prod(info.shape) for info in parameters if info.trainable)
    step = 2 * num_ranks if stage else 1
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
