"""Example inputs of a model, on which its forward pass is traced: given by the user, or known from the model itself."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_EXAMPLE = "_sdp_example"  # attribute of the model
_IMAGE_SIZE = 224
_NUM_TOKENS = 8


@dataclass(frozen=True)
class Example:
    """Arguments of one forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def trace(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Give an example of a model's inputs, before `deepspeed.initialize` or `fully_shard`.

    The residual branches of a model are read from one forward pass with these arguments, on the CPU and without the
    model's weights. Models of Transformers, timm, torchvision and Diffusers need no example. Batch size and length do
    not matter; values are only used by a forward that reads them.

    Args:
        args, kwargs: of its forward pass, such as a batch of two rows.
    """
    inside = model._modules.get("_orig_mod")  # of torch.compile's wrapper
    vars(model if inside is None else inside)[_EXAMPLE] = Example(args, kwargs)


def given_example(model: nn.Module) -> Example | None:
    """The example that the user gave."""
    given: Example | None = vars(model).get(_EXAMPLE)
    return given


def example_of(model: nn.Module) -> Example | None:
    """The example that was given, or one that the model itself describes; None without."""
    given = given_example(model)
    if given is not None:
        return given
    accepted = inspect.signature(model.forward).parameters
    name = getattr(model, "main_input_name", None)
    if isinstance(name, str) and hasattr(model, "config"):
        return _of_transformers(model, name, accepted)
    if hasattr(model, "config") and "timestep" in accepted:
        return _of_diffusers(model, accepted)
    if isinstance(first_with_weights(model), nn.Conv2d):  # such as models of timm and torchvision
        return Example((torch.rand(2, *image_shape(model)),))
    return None


def with_encoder_states(model: Any, example: Example) -> Example | None:
    """An example with states of an encoder, which the cross-attention of a decoder by itself reads; None if its forward
    takes none."""
    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in ("encoder_hidden_states", "encoder_outputs") if name in accepted), None)
    config: Any = getattr(model, "config", None)
    if name is None or name in example.kwargs or getattr(config, "is_encoder_decoder", False):
        return None
    width: Any = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "hidden_size", 1)
    states = torch.rand(2, _NUM_TOKENS - 1, width)
    return Example(example.args, {**example.kwargs, name: (states,) if name == "encoder_outputs" else states})


def _of_transformers(model: Any, name: str, accepted: Any) -> Example | None:
    config = model.config
    values: dict[str, Any] = {}
    if "grid_thw" in accepted:  # the tower of a vision-language model, on patches
        merged = 2 * getattr(config, "spatial_merge_size", 1)
        size = getattr(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        grid = torch.tensor([[1, merged, merged]])
        return Example((torch.rand(merged**2, size),), {"grid_thw": grid})
    if name == "input_ids":
        values = {name: _token_ids(getattr(_text_config(config), "vocab_size", None) or 16)}
    elif name == "pixel_values":
        values = {name: torch.rand(2, *image_shape(model))}
    elif name == "input_features":
        length = 2 * getattr(config, "max_source_positions", 32)
        values = {name: torch.rand(2, getattr(config, "num_mel_bins", 80), length)}
    elif name == "input_values":
        values = {name: torch.rand(2, 4000)}
    else:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        values["decoder_input_ids"] = _token_ids(getattr(config, "vocab_size", 16))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if "use_cache" in accepted or (takes_any and hasattr(_text_config(config), "use_cache")):
        values["use_cache"] = False
    return Example(kwargs=values)


def _text_config(config: Any) -> Any:
    """The config of the decoder, or of the only text model."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _token_ids(vocabulary: int) -> torch.Tensor:
    return torch.arange(2, 2 + 2 * _NUM_TOKENS).reshape(2, _NUM_TOKENS) % vocabulary


def _of_diffusers(model: Any, accepted: Any) -> Example:
    config = model.config
    size = getattr(config, "sample_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else size
    values = {
        next(iter(accepted)): torch.rand(2, config.in_channels, height, width),
        "timestep": torch.tensor([1, 2]),
    }
    if "class_labels" in accepted and getattr(config, "num_embeds_ada_norm", None):
        values["class_labels"] = torch.tensor([0, 1])
    return Example(kwargs=values)


def takes_images(model: nn.Module) -> bool:
    """Whether a model takes images: according to `main_input_name`, else if its first layer is a 2-d convolution."""
    name = getattr(model, "main_input_name", None)
    if name is not None:
        return bool(name == "pixel_values")
    return isinstance(first_with_weights(model), nn.Conv2d)


def has_sequences(model: nn.Module) -> bool:
    """Whether inputs of a model of Transformers have any length: text, sound, and what a decoder makes of an image."""
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return is_encoder_decoder or getattr(model, "main_input_name", "pixel_values") != "pixel_values"


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of a model's images."""
    config: Any = getattr(model, "config", None)
    first = first_with_weights(model)
    of_timm = next((module.img_size for module in model.modules() if hasattr(module, "img_size")), None)
    size: Any = getattr(config, "image_size", None) or getattr(model, "image_size", None) or of_timm or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    channels: Any = getattr(config, "num_channels", None) or getattr(first, "in_channels", 3)
    return int(channels), int(height), int(width)


def first_with_weights(model: nn.Module) -> nn.Module | None:
    """The first leaf module with a matrix or kernel."""
    leaves = (m for m in model.modules() if not any(True for _ in m.children()))
    return next((m for m in leaves if any(p.dim() > 1 for p in m.parameters(recurse=False))), None)
