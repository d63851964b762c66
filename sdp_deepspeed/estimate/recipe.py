"""What an estimate reads of a recipe: the YAML file of a run of `launch/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from sdp_deepspeed.command_parser import read_json
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.forecast import classifies_images
from sdp_deepspeed.estimate.host_types import refuse_wrong_types
from sdp_deepspeed.estimate.settings import refuse_unsharded, without_auto

_TRAINER_BATCH = 8  # per_device_train_batch_size of TrainingArguments


@dataclass(frozen=True)
class Run:
    """
    Args:
        shape: the model's, as a Transformers config with `model_type`.
        config: a DeepSpeed config without "auto"; of an FSDP2 run what it would be there.
        sequence_length: tokens of a sample; None for a model of images.
        host: "deepspeed" or "fsdp2".
    """

    shape: Mapping[str, Any]
    config: dict[str, Any]
    sequence_length: int | None
    gradient_checkpointing: bool
    host: str


def read_run(path: Path) -> Run:
    """
    Raises:
        ValueError: the file is no recipe, or a setting that has no estimate.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"recipe: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"recipe: {path} is not YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe: {path} has no sections; expected model, data, training and deepspeed")
    shape, data, training = (_section(recipe, name) for name in ("model", "data", "training"))
    if "name" in shape:
        shape = AutoConfig.from_pretrained(shape["name"]).to_dict() | shape
    if not isinstance(shape.get("model_type"), str):
        raise ValueError('recipe: model has no model_type; expected that of a Transformers config, such as "llama"')
    images = classifies_images(shape)
    length = None if images else data.get("sequence_length")
    if not images and not isinstance(length, int):
        raise ValueError(f"recipe: data.sequence_length: got {length!r}, expected a whole number of tokens")
    own, given = ("image_size", "size") if images else ("vocab_size", "vocab_size")
    if given in data:
        shape = {own: data[given]} | shape
    config = without_auto(
        _config(recipe, path),
        micro_batch=training.get("per_device_train_batch_size", _TRAINER_BATCH),
        accumulation=training.get("gradient_accumulation_steps", 1),
        dtype="bf16" if training.get("bf16") else "fp16" if training.get("fp16") else "fp32",
    )
    refuse_wrong_types(config)
    host = "deepspeed" if "deepspeed" in recipe else "fsdp2"
    if host == "fsdp2":
        refuse_unsharded(config)
    return Run(shape, config, length, bool(training.get("gradient_checkpointing")), host)


def _section(recipe: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = recipe.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"recipe: {name}: got {section!r}, expected a mapping")
    return section


def _config(recipe: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if isinstance(recipe.get("deepspeed"), str):
        return read_json(path.parent / recipe["deepspeed"], "recipe: deepspeed")
    if "deepspeed" in recipe:
        return _section(recipe, "deepspeed")
    if KEY not in recipe:
        raise ValueError(f"recipe: {path} has neither the section deepspeed nor {KEY}")
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {**auto, "bf16": {"enabled": "auto"}, KEY: recipe[KEY]}
