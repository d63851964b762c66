"""Memory, traffic and FLOPs of an optimizer step on one rank, without allocating anything.

The model consists of meta tensors. It is reduced to a rank's subnetwork by the mask that the engine applies, and runs
forward and backward once while a dispatch mode counts FLOPs and the bytes of live tensors. Model state, buffers and
traffic come from deepspeed_bytes.py, or from fsdp2_bytes.py for FSDP2.
"""

from __future__ import annotations

import textwrap
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)

from sdp_deepspeed.architectures import locate_branches, unit_costs
from sdp_deepspeed.architectures.image_flops import image_shape, takes_images
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.engine.refused_settings import refuse_settings
from sdp_deepspeed.estimate.deepspeed_bytes import RankEstimate, ShardedRun, owned, plain
from sdp_deepspeed.estimate.deepspeed_config import read_settings, setup_of, sharded_setup_of
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.estimate.fsdp2_bytes import ShardedSetup, of_rank, sharded_tensors
from sdp_deepspeed.estimate.precision import FP32_BYTES
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.parallel.buckets import BucketLayout
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors

# Model types of this package, by the module that registers them with Transformers.
_OURS = {"sdp_small_image_resnet": "sdp_deepspeed.architectures.small_image_resnet"}
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Forecast:
    """Estimate of one rank's optimizer step.

    Args:
        num_parameters: number of parameters of the dense model.
        items_per_step: tokens (or images) on all ranks.
        rank: bytes of model state, buffers and traffic.
        activations: live bytes of one micro-batch at the end of the forward pass. Attention is assumed to be fused:
            scores are not stored.
        peak: largest number of bytes of live tensors. Kernel workspaces, fragmentation and the CUDA context are not
            included.
        flops: FLOPs of the forward and backward passes on this rank.
        warnings: warnings of the planner.
    """

    num_parameters: int
    items_per_step: int
    rank: RankEstimate
    activations: int
    peak: int
    flops: int
    warnings: tuple[str, ...] = ()


class Model:
    """A Transformers model of tensors without storage.

    Args:
        shape: config with `model_type`, of a causal language model or an image classifier.
        dtype: dtype of the weights.
        sequence_length: tokens per sample; None for images.
        autocast: dtype of automatic mixed precision; None disables it.

    Raises:
        ValueError: Transformers cannot build the model.
    """

    def __init__(
        self,
        shape: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        sequence_length: int | None = None,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.sequence_length, self.autocast = sequence_length, autocast
        images = classifies_images(shape)
        auto_class: Any = AutoModelForImageClassification if images else AutoModelForCausalLM
        try:
            with torch.device("meta"):
                self.module: Any = auto_class.from_config(AutoConfig.for_model(**dict(shape)), dtype=dtype)
        except Exception as error:  # Transformers validates few values, so any error is possible
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
            raise ValueError(f"model: Transformers cannot build {shape['model_type']!r}: {reason}") from error
        if gradient_checkpointing:
            self.module.activation_checkpointing_enable({"use_reentrant": False})
        self.device = "meta"
        self.fake: AbstractContextManager[Any] = nullcontext()
        if autocast is not None:  # autocast ignores meta tensors; fake tensors on the CPU are slower
            self.device, self.fake = "cpu", FakeTensorMode(allow_non_fake_inputs=True)
            with self.fake:
                self.module = self.module.to_empty(device="cpu")
                self.module.tie_weights()  # to_empty unties them

    def inputs(self, rows: int) -> dict[str, Any]:
        """Arguments of a forward pass of `rows` samples."""
        if not takes_images(self.module):
            tokens = torch.zeros((rows, self.sequence_length or 0), dtype=torch.long, device=self.device)
            return {"input_ids": tokens, "labels": tokens, "use_cache": False}
        dtype = next(self.module.parameters()).dtype
        images = torch.zeros((rows, *image_shape(self.module)), dtype=dtype, device=self.device)
        return {"pixel_values": images, "labels": torch.zeros(rows, dtype=torch.long, device=self.device)}


@dataclass(frozen=True)
class MicroStep:
    """Live bytes during a forward and a backward pass, without weights and optimizer state.

    Args:
        activations: at the end of the forward pass.
        peak: maximum.
        peak_keeping: maximum if no `.grad` is freed.
        peak_in_units: maximum over the times at which watched parameters receive their gradients.
        flops: FLOPs of both passes.
    """

    activations: int
    peak: int
    peak_keeping: int
    peak_in_units: int
    flops: int


@dataclass(frozen=True)
class Reduction:
    """Parameters whose gradients are reduced together.

    Args:
        names: names of the parameters.
        at_first: bytes allocated when the first gradient is ready.
        at_last: bytes allocated when all gradients are ready.
        waits: whether each `.grad` is kept until all gradients are ready.
    """

    names: Collection[str]
    at_first: int = 0
    at_last: int = 0
    waits: bool = False


class _LiveBytes(FlopCounter):
    """Counts FLOPs, and live bytes of tensors that are created inside the context."""

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.peak_keeping = 0
        self.freed_gradients = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[Any, tuple[int, Any]] = {}  # FLOPs, and description of the result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype is not torch.bool:
                raise NotImplementedError("the model reads values that it computes, so it cannot be estimated")
            return True  # "all tokens are in one sequence", "no token is padding"
        if any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns)):
            return super().__torch_dispatch__(func, types, args, kwargs)  # a view, or in place
        key = (func, _described(args), _described(list((kwargs or {}).items())))
        if key in self._seen:  # most layers are alike
            flops, described = self._seen[key]
            self.total += flops
            result = _created(described)
        else:
            before = self.total
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if all(tensor.is_meta for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)):
                self._seen[key] = self.total - before, _described(result)
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.add(storage.nbytes())
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self.peak_keeping = max(self.peak_keeping, self.now + self.freed_gradients)

    def free_gradient(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.freed_gradients += parameter.grad.nbytes
        parameter.grad = None

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@dataclass(frozen=True)
class _Shape:
    """A tensor without storage."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _described(value: Any) -> Any:
    """Hashable description of an operation's arguments or result."""
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), value.stride(), value.dtype, value.device.type)
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else (type(value), value)


def _created(described: Any) -> Any:
    """Meta tensors of a description."""
    if isinstance(described, _Shape):
        return torch.empty_strided(described.size, described.strides, dtype=described.dtype, device="meta")
    return described[1] if isinstance(described[0], type) else tuple(map(_created, described))


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as on a CPU. For meta tensors, PyTorch uses an implementation that stores the
    scores."""
    is_fused = query.shape[-1] == value.shape[-1] and not (attn_mask is not None and attn_mask.requires_grad)
    if query.device.type != "meta" or not is_fused:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: torch.Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


def micro_step(
    model: Model,
    inputs: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    ignored: Iterable[torch.Tensor],
    watched: Collection[str] = (),
    reductions: Sequence[Reduction] = (),
) -> MicroStep:
    """Run one micro-batch forward and backward.

    Args:
        parameters: parameters by name.
        ignored: tensors that are not counted.
        watched: names of parameters for `MicroStep.peak_in_units`.
        reductions: other gradients are freed at once.
    """
    counter = _LiveBytes(ignored)
    input_bytes = sum(tensor.nbytes for tensor in inputs.values() if isinstance(tensor, torch.Tensor))
    counter.add(input_bytes)
    in_units = [0]
    left = [set(reduction.names) for reduction in reductions]
    indices: defaultdict[str, list[int]] = defaultdict(list)
    for index, reduction in enumerate(reductions):
        for name in reduction.names:
            indices[name].append(index)

    def on_gradient(name: str) -> None:
        if name in watched:
            in_units.append(counter.now)
        for index in indices[name]:
            reduction = reductions[index]
            if len(left[index]) == len(reduction.names):
                counter.add(reduction.at_first)
            left[index].discard(name)
            if not left[index]:
                counter.add(reduction.at_last)
                for other in reduction.names if reduction.waits else ():
                    counter.free_gradient(parameters[other])
        if not any(reductions[index].waits for index in indices[name]):
            counter.free_gradient(parameters[name])

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: on_gradient(name))
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]
    model.module.train()
    autocast = nullcontext() if model.autocast is None else torch.autocast("cpu", model.autocast)
    fused = patch.object(nn.functional, "scaled_dot_product_attention", _fused_attention)
    with model.fake, fused, counter:
        with autocast:
            output = model.module(**inputs)
        activations, loss = counter.now - input_bytes, output.loss
        del output
        loss.backward()
    for hook in hooks:
        hook.remove()
    for parameter in parameters.values():
        parameter.grad = None
    return MicroStep(activations, counter.peak, counter.peak_keeping, max(in_units), counter.total)


def forecast(
    shape: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    num_ranks: int,
    sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
    host: str = "deepspeed",
    rank: int | None = None,
) -> Forecast:
    """Estimate an optimizer step on one rank. No process group is needed.

    Args:
        shape: Transformers config with `model_type`.
        config: DeepSpeed config without "auto" and without a schedule. Without the block, plain DeepSpeed (or FSDP2)
            is estimated.
        num_ranks: data-parallel ranks.
        sequence_length: tokens per sample; None for an image classifier. Images have the config's `image_size`, else
            224 x 224 pixels.
        host: "deepspeed" or "fsdp2".
        rank: rank to estimate. Default: the rank whose subnetwork has the most FLOPs.

    Raises:
        ValueError: the model cannot be built, or a setting is invalid or cannot be estimated.
    """
    model = model_of(shape, config, sequence_length=sequence_length, gradient_checkpointing=gradient_checkpointing)
    return forecast_of(model, config, num_ranks=num_ranks, host=host, rank=rank)


def model_of(shape: Mapping[str, Any], config: Mapping[str, Any], **options: Any) -> Model:
    """Model in the precision of a config; arguments as for `forecast`."""
    settings = read_settings(config)
    autocast = torch.bfloat16 if settings.torch_autocast.enabled else None
    return Model(shape, _DTYPES[settings.dtype], autocast=autocast, **options)


def forecast_of(
    model: Model, config: Mapping[str, Any], *, num_ranks: int, host: str = "deepspeed", rank: int | None = None
) -> Forecast:
    """`forecast` for an existing model, which is unchanged afterwards."""
    settings = read_settings(config)
    micro, accumulation = settings.micro_steps(num_ranks)
    sharded = sharded_setup_of(config, accumulation) if host == "fsdp2" else None
    setup, block = setup_of(config, accumulation), parse(config)
    if block is None:
        return plain_forecasts(model, config, num_ranks=num_ranks)["FSDP2" if sharded else f"ZeRO-{setup.stage}"]
    if sharded is None:
        refuse_settings(config)
    with model.fake:
        tensors = dense_tensors(model.module)
        plan, warnings = plan_model(model.module, block, num_ranks)
        rank = busiest_rank(plan, model.module) if rank is None else rank
        inputs = model.inputs(micro)
        branches = locate_branches(model.module)
        mask = Mask(model.module, plan, rank, branches=branches, is_scaled=block.branch_scale == "training")
        mask.apply()
    memory: dict[str, Any] = {"ignored": mask.tensors(), "parameters": mask.parameters}
    if sharded is not None:
        parts = list(sharded_tensors(plan, tensors, branches))
        figures = of_rank(parts, sharded, rank)
        in_units = {part.name for part in parts if part.unit is not None}
        step = micro_step(model, inputs, **memory, watched=in_units)
        peak = _sharded_peak(figures, step, accumulation)
    else:
        run = ShardedRun(plan, tensors, setup)
        figures = run.estimate(rank)
        step, peak = _run_of_engine(run, rank, figures, model, inputs, memory)
    with model.fake:
        mask.undo()
    return Forecast(
        num_parameters=sum(prod(info.shape) for info in tensors),
        items_per_step=micro * accumulation * num_ranks * (model.sequence_length or 1),
        rank=figures,
        activations=step.activations,
        peak=peak,
        flops=step.flops * accumulation,
        warnings=tuple(f"{KEY}: {warning}" for warning in warnings),
    )


def _run_of_engine(
    run: ShardedRun, rank: int, figures: RankEstimate, model: Model, inputs: Mapping[str, Any], memory: dict[str, Any]
) -> tuple[MicroStep, int]:
    """Measure a micro-step that keeps and frees gradients like `ShardedOptimizer`, and the peak of the whole step."""
    setup, held = run.setup, run.held(rank)
    is_first = setup.accumulation == 1  # else gradients of earlier micro-steps exist from the start
    reductions = [
        Reduction(_names(bucket), at_first=bucket.size * setup.precision.gradients * is_first)
        for bucket in (held if setup.stage < 2 else ())
    ]
    for depth_range in sorted({bucket.depth_range for bucket in held}) if setup.stage == 2 else ():
        buckets = [bucket for bucket in held if bucket.depth_range == depth_range]
        averages = sum(owned(bucket, rank) for bucket in buckets) * FP32_BYTES * (is_first and not setup.offload)
        reductions.append(Reduction(set().union(*map(_names, buckets)), at_last=averages, waits=True))
    step = micro_step(model, inputs, **memory, reductions=reductions)
    in_backward = step.peak + (0 if is_first else figures.gradients)
    in_backward += run.reduce_buffers(rank) if setup.stage == 2 else 0
    in_step = figures.gradients + figures.step_gradients + figures.buffers
    return step, figures.weights + figures.optimizer + max(in_backward, in_step)


def _names(bucket: BucketLayout) -> set[str]:
    return {part.piece.parameter for part in bucket.slices}


def _sharded_peak(figures: RankEstimate, step: MicroStep, accumulation: int) -> int:
    before = figures.gradients if accumulation > 1 else 0
    in_backward = figures.gathered + max(step.peak, figures.gathered_units + step.peak_in_units)
    return figures.weights + figures.optimizer + max(figures.gradients, before + in_backward)


def plain_forecasts(model: Model, config: Mapping[str, Any], *, num_ranks: int) -> dict[str, Forecast]:
    """The same run without subnetworks, under ZeRO stages 0 (data parallelism) to 3 and FSDP2."""
    settings = read_settings(config)
    micro, accumulation = settings.micro_steps(num_ranks)
    setup = setup_of(config, accumulation)
    whole = parse({KEY: {"coverage": 1.0}})
    assert whole is not None
    with model.fake:
        tensors = dense_tensors(model.module)
        inputs = model.inputs(micro)
        parameters = dict(model.module.named_parameters())
        branches = locate_branches(model.module)
        plan, _ = plan_model(model.module, whole, num_ranks, branches=branches)
    parts = list(sharded_tensors(plan, tensors, branches))
    in_units = {part.name for part in parts if part.unit is not None}
    step = micro_step(model, inputs, parameters, ignored=named_tensors(model.module).values(), watched=in_units)
    figures, peaks = {}, {}
    for stage in (0, 1, 2):
        estimate = plain(tensors, replace(setup, stage=stage), num_ranks=num_ranks)
        in_backward = step.peak_keeping if stage < 2 else step.peak
        if accumulation > 1:
            in_backward = estimate.gradients + step.peak
        figures[f"ZeRO-{stage}"] = estimate
        in_step = estimate.gradients + estimate.step_gradients
        peaks[f"ZeRO-{stage}"] = estimate.weights + estimate.optimizer + max(estimate.buffers + in_backward, in_step)
    precision = setup.precision
    sizes = {"compute": precision.weights, "num_moments": precision.num_moments, "accumulation": accumulation}
    for name, sharded in {
        "ZeRO-3": ShardedSetup(precision.weights, wire=precision.wire, master=FP32_BYTES, **sizes),
        "FSDP2": ShardedSetup(wire=precision.wire, **sizes),
    }.items():
        figures[name] = of_rank(parts, sharded, 0)
        peaks[name] = _sharded_peak(figures[name], step, accumulation)
    forecasts = {}
    for name, estimate in figures.items():
        forecasts[name] = Forecast(
            num_parameters=sum(prod(info.shape) for info in tensors),
            items_per_step=micro * accumulation * num_ranks * (model.sequence_length or 1),
            rank=estimate,
            activations=step.activations,
            peak=peaks[name],
            flops=step.flops * accumulation,
        )
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


def classifies_images(shape: Mapping[str, Any]) -> bool:
    """Whether a Transformers config with `model_type` is of an image classifier."""
    if shape["model_type"] in _OURS:
        import_module(_OURS[shape["model_type"]])
    try:
        kind = type(AutoConfig.for_model(shape["model_type"]))
    except ValueError:  # `Model` raises it again, with the reason
        return False
    return kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def busiest_rank(plan: Plan, model: nn.Module) -> int:
    """The rank whose subnetwork has the most FLOPs; of several, the one with the most bytes."""
    costs = unit_costs(model, plan.units)
    work = []
    for subnetwork in plan.subnetwork_of_rank:
        held = [costs[unit] for unit in plan.units_of(subnetwork)]
        work.append((sum(cost.flops for cost in held), sum(cost.num_bytes for cost in held)))
    return work.index(max(work))
