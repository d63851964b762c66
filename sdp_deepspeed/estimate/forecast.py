"""What a run will take on each GPU, before it has one: memory, bytes sent and FLOPs of a step.

Nothing is allocated: the model is built from fake tensors, cut down to a worker's subnetwork by the mask that the
engine uses, and run forward and backward once, while FLOPs and what autograd keeps are counted. Model state, buffers
and traffic are those of `per_rank.py`, or of `sharded.py` under FSDP2.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
from sdp_deepspeed.engine.refusals import refuse_settings
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.estimate.per_rank import RankEstimate, estimate, plain
from sdp_deepspeed.estimate.settings import (
    dtype_of,
    micro_steps,
    optimizer_of,
    refuse_plain,
    setup_of,
    sharded_setup_of,
    with_groups,
)
from sdp_deepspeed.estimate.sharded import estimate_sharded
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors, named_tensors, pieces_by_tensor

# Model types of this package, by the module that registers them with Transformers.
_OURS = {"sdp_small_image_resnet": "sdp_deepspeed.architectures.small_image_resnet"}
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Forecast:
    """Of the rank whose subnetwork computes most; all others differ by what the plan's balance leaves (5%).

    Args:
        num_parameters: of the dense model.
        tokens_per_step: of all ranks; of a model that takes images, how many of them.
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
        """Bytes at the end of a forward pass, or in the exchange and the step, whichever takes more; with FSDP2 what is
        gathered beside. What kernels need for themselves, the caching allocator and the GPU's own context come on top.
        """
        rank = self.rank
        return rank.state + rank.gathered + max(self.activations, rank.buffers + rank.step_gradients)


def forecast(
    shape: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    num_ranks: int,
    sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
    host: str = "deepspeed",
) -> Forecast:
    """What a run will take; nothing is allocated, and no process group is needed.

    Args:
        shape: the model's, as a Transformers config with `model_type`.
        config: DeepSpeed's, with our block or without.
        num_ranks: data-parallel ranks.
        sequence_length: tokens of a block; None for an image classifier, whose images are as large as its shape says
            (`image_size`), or 224 x 224.
        host: "deepspeed", or "fsdp2" (its neurons run in as many narrower products as there are holder sets, of which
            activations here know nothing).

    Raises:
        ValueError: a model that cannot be built, a config that is refused, or one that has no formula.
    """
    micro, accumulation = micro_steps(config, num_ranks)
    sharded = sharded_setup_of(config, accumulation) if host == "fsdp2" else None
    setup, optimizer = setup_of(config, accumulation), optimizer_of(config)
    block = parse(config)
    if block is not None and sharded is None:
        refuse_settings(config)
    fake, dtype = FakeTensorMode(allow_non_fake_inputs=True), _DTYPES[dtype_of(config)]
    model = _without_data(shape, fake, dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    with fake:
        tensors = with_groups(dense_tensors(model), optimizer)
        warnings: list[str] = []
        if block is None:
            refuse_plain(config)
            figures = plain(tensors, setup, num_ranks=num_ranks)
        else:
            plan, warnings = plan_model(model, block, num_ranks)
            busiest = _busiest_rank(plan, model)
            _refuse_cut(plan, tensors, optimizer)
            per_rank = (
                estimate(plan, tensors, setup)
                if sharded is None
                else estimate_sharded(plan, tensors, sharded, locate_branches(model))
            )
            figures = per_rank[busiest]
            Mask(model, plan, busiest).apply()
        activations, flops = _one_micro_step(model, _inputs_of(model, micro, sequence_length))
    return Forecast(
        num_parameters=sum(prod(info.shape) for info in tensors),
        tokens_per_step=micro * accumulation * num_ranks * (sequence_length or 1),
        rank=figures,
        activations=activations,
        flops=flops * accumulation,
        warnings=tuple(f"{KEY}: {warning}" for warning in warnings),
    )


def classifies_images(shape: Mapping[str, Any]) -> bool:
    """Whether a Transformers config with `model_type` is of an image classifier."""
    if shape["model_type"] in _OURS:
        import_module(_OURS[shape["model_type"]])
    try:
        kind = type(AutoConfig.for_model(shape["model_type"]))
    except ValueError:  # said when the model is built
        return False
    return kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def _without_data(
    shape: Mapping[str, Any], fake: FakeTensorMode, *, dtype: torch.dtype, gradient_checkpointing: bool
) -> nn.Module:
    """A model of fake tensors, on the CPU by what they say.

    Args:
        shape: a Transformers config with `model_type`, of a causal language model or an image classifier.
        fake: must take tensors that are not fake.
    """
    images = classifies_images(shape)
    auto_class: Any = AutoModelForImageClassification if images else AutoModelForCausalLM
    try:
        # Some image models read tensors while they are built, which fake ones do not allow.
        with torch.device("meta") if images else fake:
            model = auto_class.from_config(AutoConfig.for_model(**dict(shape)), dtype=dtype)
    except Exception as error:  # of any kind: Transformers checks few of the values that it computes with
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise ValueError(
            f"recipe: model: Transformers cannot build {shape['model_type']!r} from it: {reason}"
        ) from error
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if images:
        with fake:
            model = model.to_empty(device="cpu")
    return model


def _inputs_of(model: nn.Module, rows: int, sequence_length: int | None) -> dict[str, Any]:
    """What a micro-batch of `rows` calls the model with; `sequence_length` is None for images."""
    if not takes_images(model):
        tokens = torch.zeros((rows, sequence_length or 0), dtype=torch.long, device="cpu")
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}
    dtype = next(model.parameters()).dtype
    images = torch.zeros((rows, *image_shape(model)), dtype=dtype, device="cpu")
    return {"pixel_values": images, "labels": torch.zeros(rows, dtype=torch.long, device="cpu")}


def _busiest_rank(plan: Plan, model: nn.Module) -> int:
    """The rank whose subnetwork has most FLOPs, then bytes."""
    costs = unit_costs(model, plan.units)
    work = [
        tuple(sum(getattr(costs[unit], kind) for unit in plan.units_of(k)) for kind in ("flops", "num_bytes"))
        for k in plan.subnetwork_of_rank
    ]
    return work.index(max(work))


def _refuse_cut(plan: Plan, tensors: Sequence[TensorInfo], optimizer: str) -> None:
    """ValueError if the plan cuts a tensor that the optimizer updates as a whole."""
    whole = [info for info in tensors if info.is_whole]
    cut = [name for (_, name), pieces in pieces_by_tensor(whole, plan).items() if pieces[0][0].dim is not None]
    if cut:
        raise ValueError(
            f"recipe: deepspeed: optimizer.type {optimizer!r} updates whole matrices, and {quoted(cut)} are cut into "
            "neurons or heads; use block units, or an elementwise optimizer"
        )


def _one_micro_step(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that autograd keeps at the end of the forward pass, weights left out, and FLOPs with those of backward."""
    weights = {tensor.untyped_storage()._cdata for tensor in named_tensors(model).values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # alive, so that no other gets its address
        return tensor

    model.train()
    with FlopCounter() as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**inputs).loss
        activations = sum(storage.nbytes() for storage in kept.values())
        loss.backward()
    return activations, counter.total
