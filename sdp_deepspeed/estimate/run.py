"""The model and the phases of a recipe, for `sdp plan` and `sdp estimate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.utils import CONFIG_NAME

from sdp_deepspeed.config import SubnetworkConfig, parse
from sdp_deepspeed.config.recipe import apply_override, read_recipe
from sdp_deepspeed.estimate.deepspeed_config import configs_of_phases, without_auto
from sdp_deepspeed.estimate.forecast import model_of
from sdp_deepspeed.estimate.micro_step import Model, classifies_images
from sdp_deepspeed.messages import KEY

_TRAINER_BATCH = 8  # per_device_train_batch_size of TrainingArguments
_HUB_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class Run:
    """A run, as far as an estimate depends on it.

    Args:
        phases: DeepSpeed config of each phase, without "auto". An FSDP2 run gets an equivalent one.
    """

    model: Model
    phases: Sequence[Mapping[str, Any]]
    host: str
    items: str


def read_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a recipe and build its model.

    Raises:
        ValueError: the file is not a recipe, or has a setting that cannot be estimated.
    """
    recipe = read_recipe(path, overrides)
    shape, data, training = recipe["model"], recipe["data"], recipe["training"]
    if "name" in shape:
        shape = _config_of(shape["name"], "model.name").to_dict() | shape
    if not isinstance(shape.get("model_type"), str):
        raise ValueError("model.model_type: missing; expected that of a Transformers config, such as llama")
    images = classifies_images(shape)
    length = None if images else data.get("sequence_length")
    if not images and (type(length) is not int or length < 1):
        raise ValueError(f"data.sequence_length: got {length!r}, expected an integer, at least 1")
    key, given = ("image_size", "size") if images else ("vocab_size", "vocab_size")
    if given in data:
        shape = {key: data[given]} | shape
    config = recipe.get("deepspeed")
    if config is None:
        auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        config = {**auto, "bf16": {"enabled": "auto"}, KEY: recipe[KEY]}
    config = without_auto(
        config,
        micro_batch=training.get("per_device_train_batch_size", _TRAINER_BATCH),
        accumulation=training.get("gradient_accumulation_steps", 1),
        dtype="bf16" if training.get("bf16") else "fp16" if training.get("fp16") else "fp32",
    )
    phases = configs_of_phases(config)
    if KEY in recipe and len(phases) > 1:
        raise ValueError(f"{KEY}.schedule: the plan cannot change under FSDP2; remove the key")
    checkpointing = bool(training.get("gradient_checkpointing"))
    model = model_of(shape, phases[0], sequence_length=length, gradient_checkpointing=checkpointing)
    return Run(model, phases, "fsdp2" if KEY in recipe else "deepspeed", "images" if images else "tokens")


def empty_model(name: str) -> nn.Module:
    """The model of a config, on the meta device.

    Args:
        name: of a model on the hub, or the path of its folder or config.

    Raises:
        ValueError: there is no such config, or Transformers cannot build the model.
    """
    config = _config_of(name, "--model")
    try:
        classes = [getattr(transformers, known, None) for known in config.architectures or ()]
        build = next(filter(None, classes), AutoModel.from_config)
        with torch.device("meta"):
            model: nn.Module = build(config)
    except Exception as error:  # Transformers validates few values, so any error is possible
        raise ValueError(f"--model {name}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return model


def _config_of(name: str, key: str) -> Any:
    """The config in a file or folder, in the cache, or on the hub.

    Args:
        key: of `name`, for errors.

    Raises:
        ValueError: there is none. The hub is asked once; Transformers would repeat that for half a minute.
    """
    try:
        if not Path(name).exists() and not isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=_HUB_TIMEOUT)
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # of the hub, of the network, or of a config of any kind
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"{key} {name}: expected a folder or file with a config, or the name of a model on the hub ({reason})"
        ) from error


def block_of(overrides: Sequence[str]) -> SubnetworkConfig:
    """The block that overrides such as `sdp.strategy=neuron` make of one with coverage 0.5."""
    recipe: dict[str, Any] = {KEY: {}}
    for override in overrides:
        apply_override(recipe, override, (KEY,))
    if not recipe[KEY].keys() & {"coverage", "holders", "assignment"}:
        recipe[KEY]["coverage"] = 0.5
    block = parse(recipe)
    if block is None:
        raise ValueError(f"{KEY} is disabled; remove sdp=off")
    return block
