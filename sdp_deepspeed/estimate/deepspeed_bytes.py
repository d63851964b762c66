"""Bytes that each rank holds and sends under DeepSpeed, computed from a plan and dense shapes.

Step counters of the optimizer and scalars of the gradient norm are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from sdp_deepspeed.parallel.bucket_layouts import BucketLayout, plan_buckets
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor

FP32_BYTES = 4
DEEPSPEEDS_BUCKET = 500_000_000  # elements


@dataclass(frozen=True)
class Precision:
    """Bytes per element.

    Args:
        gradients: gradients, as they are summed over micro-steps at stages 0 and 1.
        wire: gradients on the wire (`communication_data_type`).
        num_moments: fp32 moments per element: Adam 2; Lion, Adagrad, SGD with momentum 1; SGD 0.
    """

    weights: int
    gradients: int
    wire: int
    num_moments: int = 2


@dataclass(frozen=True)
class DeepSpeedSetup:
    """Settings that determine a rank's bytes, besides plan and shapes.

    Args:
        stage: ZeRO stage; SDP runs stage 0 as stage 1, and has stage 3 in teams only.
        accumulation: micro-steps per optimizer step; stage 2 sends gradients in each.
        offload: whether optimizer state is in host memory.
        bucket_elements: `reduce_bucket_size` of the config; None for the engine's default.
    """

    stage: Literal[0, 1, 2, 3]
    precision: Precision
    accumulation: int = 1
    offload: bool = False
    bucket_elements: int | None = None


@dataclass(frozen=True)
class RankEstimate:
    """Bytes that one rank holds, and sends in one optimizer step.

    Args:
        gradients: at the end of the backward pass; at stage 2 fp32 averages of the owned shards.
        optimizer: moments, and the fp32 master where one is kept.
        host_optimizer: optimizer state and gradients in host memory (CPU offload).
        buffers: flat buffers of one bucket or depth range, while it is sent.
        step_gradients: gradients that exist during the step only.
        gathered: unsharded shared weights, which stay gathered until the backward pass (FSDP2).
        gathered_units: unsharded weights of two units and gradients of one unit (FSDP2).
    """

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int = 0
    buffers: int = 0
    step_gradients: int = 0
    gathered: int = 0
    gathered_units: int = 0
    sent: int = 0

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state on the device."""
        return self.weights + self.gradients + self.optimizer

    def peak(self, in_backward: int, in_step: int) -> int:
        """The peak on the device: weights and optimizer state, and what exists beside them in the backward pass or in
        the step, whichever is more."""
        return self.weights + self.optimizer + max(in_backward, in_step)


def leaves(ranks: Sequence[int], node: range) -> bool:
    """Whether a ring over some ranks leaves a node."""
    return 0 < sum(rank in node for rank in ranks) < len(ranks)


@dataclass(frozen=True)
class DeepSpeedRun:
    """Buckets of the engine, and each rank's share of them."""

    plan: Plan
    tensors: Sequence[TensorInfo]
    setup: DeepSpeedSetup

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        trained = [info for info in self.tensors if info.trainable]
        pieces = pieces_by_tensor(trained, self.plan)
        return plan_buckets(
            pieces,
            {info.name: info.shape for info in trained},
            {info.name: info.dtype for info in trained},
            {info.name: 0 for info in trained},
            bucket_size=self.setup.bucket_elements,
        )

    @property
    def is_backward(self) -> bool:
        return self.plan.regime == "backward"

    def held(self, rank: int) -> list[BucketLayout]:
        return [bucket for bucket in self.buckets if rank in bucket.holders]

    def estimate(self, rank: int) -> RankEstimate:
        """Bytes of a data-parallel rank."""
        setup, held = self.setup, self.held(rank)
        state = sum(shard_elements(bucket, rank) * self._optimizer_bytes(bucket) for bucket in held)
        stepped = sum(shard_elements(bucket, rank) for bucket in held)
        stored = self.buckets if self.is_backward else held
        num_stored = sum(b.num_elements if b.is_cut else b.size for b in stored) + self._num_frozen(rank)
        return RankEstimate(
            weights=num_stored * setup.precision.weights,
            gradients=self._gradients(held, stepped),
            optimizer=0 if setup.offload else state,
            host_optimizer=state + stepped * FP32_BYTES if setup.offload else 0,
            buffers=max(
                self.reduce_buffers(rank),
                setup.precision.weights * self.plan.num_ranks * max(self._returned, default=0),
            ),
            step_gradients=self._step_gradients(held, rank),
            sent=self.sent_out_of(range(rank, rank + 1)),
        )

    def _optimizer_bytes(self, bucket: BucketLayout) -> int:
        """Per element: moments, and a master unless fp32 weights are stepped in place."""
        precision = self.setup.precision
        in_place = not bucket.is_cut and precision.weights == FP32_BYTES and not self.setup.offload
        return FP32_BYTES * (precision.num_moments + (not in_place))

    def _num_frozen(self, rank: int) -> int:
        """Elements that a rank stores of frozen parameters, which are in no bucket."""
        shapes = {info.name: info.shape for info in self.tensors if not info.trainable}
        frozen = [info for info in self.tensors if not info.trainable]
        return sum(
            piece.num_elements(shapes[name])
            for name, pieces in pieces_by_tensor(frozen, self.plan).items()
            for piece, ranks in pieces
            if self.is_backward or rank in ranks
        )

    def _gradients(self, held: Sequence[BucketLayout], stepped: int) -> int:
        if self.setup.stage == 2:
            return 0 if self.setup.offload else stepped * FP32_BYTES
        return sum(bucket.size for bucket in held) * self.setup.precision.gradients

    def _step_gradients(self, held: Sequence[BucketLayout], rank: int) -> int:
        """Averages in fp32, if gradients are not."""
        if self.setup.stage == 2 or self.setup.precision.gradients == FP32_BYTES:
            return 0
        made = [shard_elements(bucket, rank) * FP32_BYTES for bucket in held]
        return max(made, default=0) if self.setup.offload else sum(made)

    def reduce_buffers(self, rank: int) -> int:
        """Bytes of a packed bucket (stage 2), and of its copy in the communication dtype."""
        precision = self.setup.precision
        width = precision.gradients * (self.setup.stage == 2)
        if precision.wire != precision.gradients:
            width += precision.wire
        return width * max((bucket.size for bucket in self.held(rank)), default=0)

    @cached_property
    def _returned(self) -> list[int]:
        """Elements that each rank sends to all ranks in the backward regime, by depth range."""
        counts: dict[int, list[int]] = {}
        for bucket in self.buckets if self.is_backward else []:
            ranks = counts.setdefault(bucket.depth_range, [0] * self.plan.num_ranks)
            for rank in bucket.owners:
                ranks[rank] += bucket.size // len(bucket.owners)
        return [max(ranks) for ranks in counts.values()]

    def sent_out_of(self, node: range) -> int:
        """Bytes that all ranks of a node, which has these data-parallel ranks, send to other nodes in a step. Rings are
        assumed, which leave a node once."""
        precision, sent = self.setup.precision, 0
        per_element = precision.wire * (self.setup.accumulation if self.setup.stage == 2 else 1)
        if not self.is_backward:
            per_element += precision.weights
        elif leaves(range(self.plan.num_ranks), node):
            sent = (self.plan.num_ranks - 1) * sum(self._returned) * precision.weights
        for bucket in self.buckets:
            if leaves(bucket.holders, node):
                sent += (bucket.size - bucket.size // len(bucket.owners)) * per_element
        return sent


def shard_elements(bucket: BucketLayout, rank: int) -> int:
    """Elements of a rank's shard, with padding; 0 if it holds nothing of the bucket."""
    return bucket.size // len(bucket.owners) if rank in bucket.holders else 0


def plain_deepspeed_estimate(tensors: Sequence[TensorInfo], setup: DeepSpeedSetup, *, num_ranks: int) -> RankEstimate:
    """Rank 0 under plain DeepSpeed.

    Stages 1 and 2 pad the parameters to a multiple of 2n elements, keep fp32 masters of fp32 weights, too, allocate a
    bucket of `reduce_bucket_size` elements (500 million by default), and all-reduce gradients, so that they send
    3 (n-1) / n elements per parameter.
    """
    stage, precision = setup.stage, setup.precision
    parameters = [info for info in tensors if info.kind == "parameter"]
    whole = sum(prod(info.shape) for info in parameters)
    trained = sum(prod(info.shape) for info in parameters if info.trainable)
    step = 2 * num_ranks if stage else 1
    padded = -(-trained // step) * step
    stepped = padded // (num_ranks if stage else 1)
    has_master = stage > 0 or precision.weights != FP32_BYTES
    state = stepped * FP32_BYTES * (precision.num_moments + has_master)
    kept, start = 0, 0
    for info in parameters if stage == 2 else []:  # stage 2 keeps all of a gradient that begins in the shard
        if info.trainable:
            kept += prod(info.shape) if start < stepped else 0
            start += prod(info.shape)
    share = trained * (num_ranks - 1) // num_ranks
    rounds = setup.accumulation if stage == 2 else 1
    return RankEstimate(
        weights=(whole - trained + padded) * precision.weights,
        gradients=(trained if stage < 2 else kept) * precision.gradients,
        optimizer=0 if setup.offload else state,
        host_optimizer=state if setup.offload else 0,
        buffers=(setup.bucket_elements or DEEPSPEEDS_BUCKET) * precision.wire if stage else 0,
        step_gradients=stepped * FP32_BYTES if stage else 0,
        sent=2 * rounds * share * precision.wire + (share * precision.weights if stage else 0),
    )
