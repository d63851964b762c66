"""One micro-step of a model without storage: FLOPs, and bytes of live tensors.

The model consists of meta tensors. It runs forward and backward once, while a dispatch mode counts.
"""

from __future__ import annotations

import textwrap
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
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

from sdp_deepspeed.architectures.examples import image_shape, takes_images
from sdp_deepspeed.estimate.flop_counter import FlopCounter

# Model types of this package, by the module that registers them with Transformers.
_OURS = {"sdp_small_image_resnet": "sdp_deepspeed.small_image_resnet"}


def classifies_images(shape: Mapping[str, Any]) -> bool:
    """Whether a Transformers config with `model_type` is of an image classifier."""
    if shape["model_type"] in _OURS:
        import_module(_OURS[shape["model_type"]])
    try:
        kind = type(AutoConfig.for_model(shape["model_type"]))
    except ValueError:  # `Model` raises it again, with the reason
        return False
    return kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


class Model:
    """A Transformers model of tensors without storage.

    Args:
        shape: config with `model_type`, of a causal language model or an image classifier.
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
        peak_keeping: maximum if no `.grad` is freed.
        peak_in_units: maximum over the times at which watched parameters receive their gradients.
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
        self._known = {id(tensor.untyped_storage()) for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype is not torch.bool:
                raise NotImplementedError("the model reads values that it computes, so it cannot be estimated")
            return True  # "all tokens are in one sequence", "no token is padding"
        if any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns)):
            return super().__torch_dispatch__(func, types, args, kwargs)  # a view, or in place
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    self._known.add(id(storage))
                    self.add(storage.nbytes())
                    weakref.finalize(storage, self._free, id(storage), storage.nbytes())
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
                if reduction.waits:
                    for other in reduction.names:
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
