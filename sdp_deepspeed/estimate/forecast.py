"""Memory, traffic and FLOPs of an optimizer step on one rank, without allocating anything.

The model is reduced to a rank's subnetwork by the mask that the engine applies, and runs one micro-step
(micro_step.py). Model state, buffers and traffic come from deepspeed_bytes.py, or from fsdp2_bytes.py for FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import LocalSteps, SubnetworkConfig, parse
from sdp_deepspeed.engine.refused_settings import refuse_settings
from sdp_deepspeed.estimate.deepspeed_bytes import (
    FP32_BYTES,
    DeepSpeedRun,
    RankEstimate,
    plain_deepspeed_estimate,
    shard_elements,
)
from sdp_deepspeed.estimate.deepspeed_config import deepspeed_setup, fsdp2_setup, read_settings
from sdp_deepspeed.estimate.fsdp2_bytes import (
    FSDP2Setup,
    fsdp2_estimate,
    fsdp2_sent_out_of,
    fsdp2_tensors,
    names_in_units,
)
from sdp_deepspeed.estimate.micro_step import MicroStep, Model, Reduction, micro_step
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors, named_tensors, tensor_info
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.teams.exchange import bytes_per_meeting
from sdp_deepspeed.teams.shares import num_elements, shares_of

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Forecast:
    """Estimate of one rank's optimizer step.

    Args:
        items_per_step: tokens (or images) on all ranks.
        rank: bytes of model state, buffers and traffic.
        activations: live bytes of one micro-batch at the end of the forward pass. Attention is assumed to be fused:
            scores are not stored.
        peak: largest number of bytes of live tensors. Kernel workspaces, fragmentation and the CUDA context are not
            included.
        out_of_node: bytes that this rank's node sends to others in a step; None if ranks per node are not known.
        coverage: C of the plan, weighted by FLOPs; 1 without subnetworks.
        anchors: bytes of anchors and outer momentum in host memory (teams).
    """

    num_parameters: int
    items_per_step: int
    rank: RankEstimate
    activations: int
    peak: int
    flops: int
    out_of_node: int | None = None
    warnings: tuple[str, ...] = ()
    coverage: float = 1.0
    anchors: int = 0
    sent_per_meeting: int = 0


def model_of(shape: Mapping[str, Any], config: Mapping[str, Any], **options: Any) -> Model:
    """Model in the precision of a DeepSpeed config; other arguments as for `Model`."""
    settings = read_settings(config)
    autocast = torch.bfloat16 if settings.torch_autocast.enabled else None
    return Model(shape, _DTYPES[settings.dtype], autocast=autocast, **options)


def forecast(
    model: Model,
    config: Mapping[str, Any],
    *,
    num_ranks: int,
    host: str = "deepspeed",
    rank: int | None = None,
    ranks_per_node: int | None = None,
) -> Forecast:
    """Estimate an optimizer step on one rank. No process group is needed. The model is unchanged afterwards.

    Args:
        config: DeepSpeed config without "auto" and without a schedule. Without the block, plain DeepSpeed (or FSDP2)
            is estimated.
        num_ranks: data-parallel ranks; with teams, those of each.
        host: "deepspeed" or "fsdp2".
        rank: rank, or team, to estimate. Default: the rank whose subnetwork has the most FLOPs.
        ranks_per_node: data-parallel ranks of a node, for traffic between nodes.

    Raises:
        ValueError: a setting is invalid or cannot be estimated.
    """
    micro, accumulation = read_settings(config).micro_steps(num_ranks)
    fsdp2 = fsdp2_setup(config, accumulation) if host == "fsdp2" else None
    deepspeed, block = deepspeed_setup(config, accumulation), parse(config)
    if block is not None and block.local_steps is not None:
        return _forecast_of_team(model, config, block, block.local_steps, num_ranks, rank, ranks_per_node)
    if block is None:
        plain = plain_forecasts(model, config, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
        return plain["FSDP2" if fsdp2 else f"ZeRO-{deepspeed.stage}"]
    if fsdp2 is None:
        refuse_settings(config)
    if ranks_per_node is not None and num_ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node: got {ranks_per_node}, which does not divide {num_ranks} ranks")
    with model.fake:
        tensors = dense_tensors(model.module)
        inputs = model.inputs(micro)
    with _reduced(model, block, num_ranks, rank) as (mask, coverage, warnings):
        plan, rank = mask.plan, mask.rank
        memory: dict[str, Any] = {"ignored": mask.tensors(), "parameters": mask.parameters}
        first = 0 if ranks_per_node is None else rank // ranks_per_node * ranks_per_node
        node = range(first, first + (ranks_per_node or num_ranks))
        if fsdp2 is not None:
            parts = list(fsdp2_tensors(plan, tensors, mask.branches))
            estimate = fsdp2_estimate(parts, fsdp2, rank)
            step = micro_step(model, inputs, **memory, watched=names_in_units(parts))
            peak = _fsdp2_peak(estimate, step, accumulation)
            out_of_node = fsdp2_sent_out_of(node, parts, fsdp2)
        else:
            run = DeepSpeedRun(plan, tensors, deepspeed)
            estimate = run.estimate(rank)
            step = micro_step(model, inputs, **memory, reductions=_reductions(run, rank))
            in_backward = step.peak + (estimate.gradients if accumulation > 1 else 0)
            in_backward += run.reduce_buffers(rank) if deepspeed.stage == 2 else 0
            peak = estimate.peak(in_backward, estimate.gradients + estimate.step_gradients + estimate.buffers)
            out_of_node = run.sent_out_of(node)
    return Forecast(
        num_parameters=sum(prod(info.shape) for info in tensors),
        items_per_step=micro * accumulation * num_ranks * (model.sequence_length or 1),
        rank=estimate,
        activations=step.activations,
        peak=peak,
        flops=step.flops * accumulation,
        out_of_node=None if ranks_per_node is None else out_of_node,
        warnings=tuple(f"{KEY}: {warning}" for warning in warnings),
        coverage=coverage,
    )


@contextmanager
def _reduced(
    model: Model, block: SubnetworkConfig, num_ranks: int, rank: int | None
) -> Iterator[tuple[Mask, float, list[str]]]:
    """Context in which a model is the subnetwork of a rank, by default the busiest; with coverage by FLOPs, and
    warnings."""
    module = model.module
    with model.fake:
        branches = proven_branches(module, block.strategy)
        plan, warnings = plan_model(module, block, num_ranks, branches=branches)
        coverage = plan.coverage_by_flops(unit_costs(module, plan.units))
        rank = busiest_rank(plan, module) if rank is None else rank
        mask = Mask(module, plan, rank, branches, is_scaled=block.is_scaled)
        mask.apply()
    try:
        yield mask, coverage, warnings
    finally:
        with model.fake:
            mask.undo()


def _reductions(run: DeepSpeedRun, rank: int) -> list[Reduction]:
    """What `ShardedOptimizer` allocates and frees as gradients of a micro-step become ready."""
    setup, held = run.setup, run.held(rank)
    is_first = setup.accumulation == 1  # else gradients of earlier micro-steps exist from the start
    if setup.stage < 2:
        width = setup.precision.gradients * is_first
        return [Reduction(bucket.names, at_first=bucket.size * width) for bucket in held]
    width = FP32_BYTES * (is_first and not setup.offload)
    reductions = []
    for depth_range in sorted({bucket.depth_range for bucket in held}):
        buckets = [bucket for bucket in held if bucket.depth_range == depth_range]
        averages = sum(shard_elements(bucket, rank) for bucket in buckets) * width
        names = {name for bucket in buckets for name in bucket.names}
        reductions.append(Reduction(names, at_last=averages, waits=True))
    return reductions


def _fsdp2_peak(estimate: RankEstimate, step: MicroStep, accumulation: int) -> int:
    in_backward = estimate.gathered + max(step.peak, estimate.gathered_units + step.peak_in_units)
    in_backward += estimate.gradients if accumulation > 1 else 0
    return estimate.peak(in_backward, estimate.gradients)


def _forecast_of_team(
    model: Model,
    config: Mapping[str, Any],
    block: SubnetworkConfig,
    steps: LocalSteps,
    num_ranks: int,
    team: int | None,
    ranks_per_node: int | None,
) -> Forecast:
    """A rank of a team, which is a plain job on the subnetwork of one of K workers."""
    with model.fake:
        dense = _PlainModel.of(model, num_ranks)
    with _reduced(model, block, steps.teams, team) as (mask, coverage, warnings):
        stored, tensors = {}, []
        for name, parameter in mask.parameters.items():
            if mask.stored_pieces(name):
                stored[name] = parameter
                tensors.append(tensor_info(name, parameter))
            for piece in mask.stored_pieces(name):
                if piece.dim is not None and not mask.is_held(piece):  # backward regime: beside the parameter
                    tensors.append(tensor_info(f"{name}, frozen", mask.view(piece)))
        subnetwork = replace(dense, tensors=tensors, parameters=stored, ignored=mask.tensors())
        columns = _plain_forecasts(model, config, subnetwork, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
        shares = shares_of(mask, 0, num_ranks)
    settings = read_settings(config)
    wire = torch.bfloat16 if settings.communication_data_type == "bf16" else torch.float32
    column = columns[f"ZeRO-{settings.zero_optimization.stage}"]
    return replace(
        column,
        num_parameters=sum(prod(info.shape) for info in dense.tensors),
        items_per_step=column.items_per_step * steps.teams,
        warnings=tuple(f"{KEY}: {warning}" for warning in warnings),
        coverage=coverage,
        anchors=num_elements(shares) * FP32_BYTES * (1 + (steps.outer_momentum > 0)),
        sent_per_meeting=bytes_per_meeting(shares, mask.rank, mask.plan, wire),
    )


@dataclass(frozen=True)
class _PlainModel:
    """What an estimate without subnetworks needs of a model.

    Args:
        plan, branches: of C = 1, for tensors that are gathered together.
        ignored: tensors that are no activations.
    """

    tensors: Sequence[TensorInfo]
    parameters: Mapping[str, nn.Parameter]
    ignored: Sequence[torch.Tensor]
    plan: Plan
    branches: Sequence[LocatedBranch]

    @classmethod
    def of(cls, model: Model, num_ranks: int) -> _PlainModel:
        whole = parse({KEY: {"coverage": 1.0}})
        assert whole is not None
        branches = proven_branches(model.module)
        plan, _ = plan_model(model.module, whole, num_ranks, branches=branches)
        return cls(
            dense_tensors(model.module),
            dict(model.module.named_parameters()),
            [*named_tensors(model.module).values()],
            plan,
            branches,
        )


def plain_forecasts(
    model: Model, config: Mapping[str, Any], *, num_ranks: int, ranks_per_node: int | None = None
) -> dict[str, Forecast]:
    """The same run without subnetworks, under ZeRO stages 0 (data parallelism) to 3 and FSDP2."""
    with model.fake:
        plain = _PlainModel.of(model, num_ranks)
    return _plain_forecasts(model, config, plain, num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def _plain_forecasts(
    model: Model, config: Mapping[str, Any], plain: _PlainModel, *, num_ranks: int, ranks_per_node: int | None
) -> dict[str, Forecast]:
    micro, accumulation = read_settings(config).micro_steps(num_ranks)
    setup, tensors = deepspeed_setup(config, accumulation), plain.tensors
    with model.fake:
        inputs = model.inputs(micro)
    parts = list(fsdp2_tensors(plain.plan, tensors, plain.branches))
    step = micro_step(model, inputs, plain.parameters, ignored=plain.ignored, watched=names_in_units(parts))
    forecasts: dict[str, Forecast] = {}

    def add(name: str, estimate: RankEstimate, peak: int) -> None:
        forecasts[name] = Forecast(
            num_parameters=sum(prod(info.shape) for info in tensors),
            items_per_step=micro * accumulation * num_ranks * (model.sequence_length or 1),
            rank=estimate,
            activations=step.activations,
            peak=peak,
            flops=step.flops * accumulation,
            out_of_node=None if ranks_per_node is None else estimate.sent * (ranks_per_node < num_ranks),
        )

    for stage in (0, 1, 2):
        estimate = plain_deepspeed_estimate(tensors, replace(setup, stage=stage), num_ranks=num_ranks)
        in_backward = step.peak_keeping if stage < 2 else step.peak
        if accumulation > 1:
            in_backward = estimate.gradients + step.peak
        in_step = estimate.gradients + estimate.step_gradients
        add(f"ZeRO-{stage}", estimate, estimate.peak(estimate.buffers + in_backward, in_step))
    precision = setup.precision
    sizes = {"compute": precision.weights, "num_moments": precision.num_moments, "accumulation": accumulation}
    zero_3 = FSDP2Setup(precision.weights, wire=precision.wire, master=FP32_BYTES, **sizes)
    for name, fsdp2 in {"ZeRO-3": zero_3, "FSDP2": FSDP2Setup(wire=precision.wire, **sizes)}.items():
        estimate = fsdp2_estimate(parts, fsdp2, 0)
        add(name, estimate, _fsdp2_peak(estimate, step, accumulation))
    return forecasts


def largest_micro_batches(
    columns: Callable[[Mapping[str, Any]], Mapping[str, Forecast]],
    config: Mapping[str, Any],
    num_ranks: int,
    limit: int,
) -> dict[str, int]:
    """Largest micro-batch whose peak is at most `limit` bytes, by name of the forecast; 0 if there is none. The number
    of micro-steps is constant.

    Args:
        columns: returns the forecasts of a config.
    """
    micro, accumulation = read_settings(config).micro_steps(num_ranks)

    def peaks(rows: int) -> dict[str, int]:
        sizes = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation}
        forecasts = columns({key: value for key, value in config.items() if key != "train_batch_size"} | sizes)
        return {name: column.peak for name, column in forecasts.items()}

    # Large micro-batches peak in the backward pass, where bytes grow linearly with the micro-batch.
    smallest, few, many = peaks(1), peaks(64 * micro), peaks(128 * micro)
    result = {}
    for name in smallest:
        per_row = (many[name] - few[name]) / (64 * micro)
        fixed = few[name] - 64 * micro * per_row
        result[name] = 0 if smallest[name] > limit else max(1, int((limit - fixed) / per_row))
    return result


def busiest_rank(plan: Plan, model: nn.Module) -> int:
    """The rank whose subnetwork has the most FLOPs; of several, the one with the most bytes."""
    costs = unit_costs(model, plan.units)
    work = []
    for subnetwork in plan.subnetwork_of_rank:
        held = [costs[unit] for unit in plan.units_of(subnetwork)]
        work.append((sum(cost.flops for cost in held), sum(cost.num_bytes for cost in held)))
    return work.index(max(work))
