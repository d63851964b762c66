"""The dense model that a run starts from, the same on every rank."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from sdp_deepspeed.config import parse
from sdp_deepspeed.data import DataBundle
from sdp_deepspeed.deferred_init.init import Init
from sdp_deepspeed.messages import nearest


def build_model(
    shape: Mapping[str, Any],
    *,
    seed: int,
    gradient_checkpointing: bool = False,
    deferred: bool = False,
    dtype: torch.dtype = torch.float32,
    auto_class: Any = AutoModelForCausalLM,
) -> torch.nn.Module:
    """A model with fresh weights.

    Args:
        shape: a Transformers config with `model_type`.
        seed: of the weights; the same on every rank gives the same model.
        deferred: leave it to `deepspeed.initialize` or `fully_shard` to make each rank's part of the weights; they are
            the same.
        auto_class: of Transformers, for the model's head.

    Raises:
        ValueError: a model type that Transformers does not know, or a shape that it does not accept.
    """
    try:
        config = AutoConfig.for_model(**dict(shape))
        _refuse_misspelled(shape, config)
        torch.manual_seed(seed)
        context: AbstractContextManager[Any] = Init() if deferred else nullcontext()
        with context:
            model = auto_class.from_config(config, dtype=dtype)
    except Exception as error:  # of any kind: Transformers checks few of the values that it computes with
        kind = "" if isinstance(error, (ValueError, StrictDataclassError)) else f"{type(error).__name__}: "
        reason = textwrap.shorten(f"{kind}{error}", 300, placeholder=" ...")
        raise ValueError(
            f"--model: Transformers cannot build {shape['model_type']!r} from this JSON: {reason}"
        ) from error
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # as FSDP2 needs it
    return model


def may_defer(deepspeed_config: Mapping[str, Any]) -> bool:
    """Whether a config has our engine fill in the weights: plain DeepSpeed and tensor parallelism need them before."""
    return parse(deepspeed_config) is not None and "tensor_parallel" not in deepspeed_config


def _refuse_misspelled(shape: Mapping[str, Any], config: Any) -> None:
    """Transformers keeps keys that it does not know and goes on with its default for the one that was meant."""
    known = type(config)().to_dict().keys()
    for key in shape:
        meant = nearest(key, known, cutoff=0.85)
        if meant and not hasattr(type(config)(), key):
            raise ValueError(f"unknown key {key!r}, did you mean {meant!r}?")


def check_fits(config: Any, data: DataBundle) -> None:
    """Refuse a tokenizer or a sequence that the model has no room for.

    Args:
        config: the model's.

    Raises:
        ValueError: with both numbers and the setting to change.
    """
    num_ids, sequence_length = data.prepared.vocab_size, data.train.sequence_length
    if num_ids > config.vocab_size:
        gaps = f" (it has {num} and leaves gaps)" if (num := len(data.tokenizer)) < num_ids else ""
        raise ValueError(
            f"the tokenizer needs {num_ids} ids{gaps}, the model's vocab_size is {config.vocab_size}: raise "
            "vocab_size in the --model JSON, or lower it in the --data JSON"
        )
    longest = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > longest:
        raise ValueError(
            f"sequence_length is {sequence_length}, the model's max_position_embeddings {longest}: lower the first in "
            "the --data JSON, or raise the second in the --model JSON"
        )
