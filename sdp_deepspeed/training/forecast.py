"""What a run will take on each GPU, before it has one: memory, bytes sent and FLOPs of a step.

Nothing is allocated: the model is built from fake tensors, cut down to a worker's subnetwork by the mask that the
engine uses, and run forward and backward once, while FLOPs and what autograd keeps are counted. Model state, buffers
and traffic are those of `estimate/per_rank.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sdp_deepspeed.architectures import locate_branches, unit_costs
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.per_rank import RankEstimate, Setup, estimate, plain
from sdp_deepspeed.estimate.precision import Precision
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.measure.flops import FlopCounter
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors, named_tensors
from sdp_deepspeed.support.refusals import refuse_unsupported
from sdp_deepspeed.training.model import build_model

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1, "fusedlion": 1, "deepspeedcpulion": 1, "deepspeedcpuadagrad": 1}


@dataclass(frozen=True)
class Forecast:
    """Of the rank whose subnetwork computes most; all others differ by what the plan's balance leaves (5%).

    Args:
        num_parameters: of the dense model.
        tokens_per_step: of all ranks.
        rank: bytes of model state and of what is sent, from the formulas.
        activations: bytes that autograd keeps of one micro-batch at the end of the forward pass. Flash attention is
            assumed (no matrix of scores), and one output more of each attention than kernels keep.
        flops: of this rank in one optimizer step.
        warnings: of the planner.
    """

    num_parameters: int
    tokens_per_step: int
    rank: RankEstimate
    activations: int
    flops: int
    warnings: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes at the end of a forward pass, or in the exchange and the step, whichever takes more. What kernels need
        for themselves, the caching allocator and the GPU's own context come on top."""
        return self.rank.state + max(self.activations, self.rank.buffers + self.rank.step_gradients)


def micro_steps(config: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Micro-batch of a rank, and micro-steps, from two or three of DeepSpeed's batch sizes.

    Raises:
        ValueError: they do not say it, or contradict each other.
    """
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"--deepspeed_config: {key}: got {value!r}, expected a whole number of at least 1")
    whole = config.get("train_batch_size")
    micro, accumulation = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    if micro is None and whole is not None:
        micro = whole // (num_ranks * (accumulation or 1))
    if not micro:
        raise ValueError("--deepspeed_config: give train_micro_batch_size_per_gpu, or a larger train_batch_size")
    if accumulation is None:
        accumulation = 1 if whole is None else whole // (micro * num_ranks)
    if whole is not None and whole != micro * accumulation * num_ranks:
        raise ValueError(
            f"--deepspeed_config: train_batch_size is {whole}, but {num_ranks} ranks with micro-batches of {micro} and "
            f"{accumulation} micro-steps make {micro * accumulation * num_ranks}"
        )
    return micro, accumulation


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands below a key; nothing if it is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"--deepspeed_config: {key}: got {value!r}, expected an object {{...}}")
    return value or {}


def setup_of(config: Mapping[str, Any], accumulation: int) -> Setup:
    """What decides bytes, from a DeepSpeed config whose settings are of the right types.

    Raises:
        ValueError: stage 3, or tensor parallelism, which have no formula here.
    """
    zero = _part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2) or "tensor_parallel" in config:
        what = "tensor_parallel" if stage in (0, 1, 2) else f"zero_optimization.stage {stage!r}"
        raise ValueError(f"--deepspeed_config: {what} cannot be estimated; possible are ZeRO stages 0, 1 and 2")
    wire = config.get("communication_data_type")
    optimizer = str(_part(config, "optimizer").get("type", "AdamW")).lower()
    parameters = _part(_part(config, "optimizer"), "params")
    moments = 1 if optimizer == "sgd" and parameters.get("momentum") else _MOMENTS.get(optimizer, 2)
    precision = Precision.of(
        dtype_of(config),
        accumulate_in_fp32=_part(config, "data_types").get("grad_accum_dtype") == "fp32",
        wire=None if wire is None else 4 if wire == "fp32" else 2,
        moments=moments,
    )
    return Setup(
        stage=cast(Literal[0, 1, 2], stage),
        precision=precision,
        accumulation=accumulation,
        offload=_part(zero, "offload_optimizer").get("device") == "cpu",
        bucket_elements=zero.get("reduce_bucket_size"),
        overlap=bool(zero.get("overlap_comm", False)),
    )


def dtype_of(config: Mapping[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Of the weights."""
    if (_part(config, "bf16") or _part(config, "bfloat16")).get("enabled"):
        return "bf16"
    return "fp16" if _part(config, "fp16").get("enabled") else "fp32"


def forecast(
    shape: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    num_ranks: int,
    sequence_length: int,
    gradient_checkpointing: bool = False,
) -> Forecast:
    """What a run will take; nothing is allocated, and no process group is needed.

    Args:
        shape: the model's, as a Transformers config with `model_type`.
        config: DeepSpeed's, with our block or without.
        num_ranks: data-parallel ranks.
        sequence_length: tokens of a block.

    Raises:
        ValueError: a model that cannot be built, a config that is refused, or one that has no formula.
    """
    micro, accumulation = micro_steps(config, num_ranks)
    setup = setup_of(config, accumulation)
    block = parse(config)
    if block is not None:
        refuse_unsupported(block, config)
    with FakeTensorMode():
        dtype = _DTYPES[dtype_of(config)]
        model = build_model(shape, seed=0, gradient_checkpointing=gradient_checkpointing, dtype=dtype)
        tensors = [replace(info, group=0) for info in dense_tensors(model)]
        warnings: list[str] = []
        if block is None:
            figures = plain(tensors, setup, num_ranks=num_ranks)
        else:
            plan, warnings = plan_model(model, block, num_ranks)
            busiest = _busiest_rank(plan, model)
            figures = estimate(plan, tensors, setup)[busiest]
            cut_down(model, plan, tensors, busiest)
        activations, flops = _one_micro_step(model, (micro, sequence_length))
    return Forecast(
        num_parameters=sum(prod(info.shape) for info in tensors),
        tokens_per_step=micro * accumulation * num_ranks * sequence_length,
        rank=figures,
        activations=activations,
        flops=flops * accumulation,
        warnings=tuple(f"{KEY}: {warning}" for warning in warnings),
    )


def _busiest_rank(plan: Plan, model: nn.Module) -> int:
    """The rank whose subnetwork has most FLOPs, then bytes."""
    costs = unit_costs(model, plan.units)
    work = [
        tuple(sum(getattr(costs[unit], kind) for unit in plan.units_of(k)) for kind in ("flops", "num_bytes"))
        for k in plan.subnetwork_of_rank
    ]
    return work.index(max(work))


def cut_down(model: nn.Module, plan: Plan, tensors: Sequence[TensorInfo], rank: int) -> None:
    """Make a whole model what `rank` has of it."""
    own = RankModel(plan=plan, tensors=tuple(tensors), views=PieceViews(named_tensors(model)), rank=rank)
    Mask(model, own, locate_branches(model)).apply()


def _one_micro_step(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Bytes that autograd keeps at the end of the forward pass, weights left out, and FLOPs with those of backward."""
    weights = {tensor.untyped_storage()._cdata for tensor in named_tensors(model).values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # alive, so that no other gets its address
        return tensor

    tokens = torch.zeros(size, dtype=torch.long, device="cpu")
    model.train()
    with FlopCounter() as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        activations = sum(storage.nbytes() for storage in kept.values())
        loss.backward()
    return activations, counter.total
