"""The dense model that a run starts from, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def build_model(shape: Mapping[str, Any], *, seed: int, gradient_checkpointing: bool = False) -> torch.nn.Module:
    """A causal language model with fresh weights in fp32.

    Args:
        shape: a Transformers config with `model_type`.
        seed: of the weights; the same on every rank gives the same model.

    Raises:
        ValueError: a model type that Transformers does not know, or a shape that it does not accept.
    """
    try:
        config = AutoConfig.for_model(**dict(shape))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"--model: Transformers cannot build {shape['model_type']!r} from this JSON: {first_line}") from error
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def check_fits(config: Any, *, num_tokens: int, sequence_length: int) -> None:
    """Refuse a tokenizer or a sequence that the model has no room for.

    Raises:
        ValueError: with both numbers and the setting to change.
    """
    if num_tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {num_tokens} entries, the model's vocab_size is {config.vocab_size}: raise vocab_size in "
            "the --model JSON, or lower it in the --data JSON"
        )
    longest = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > longest:
        raise ValueError(
            f"sequence_length is {sequence_length}, the model's max_position_embeddings {longest}: lower the first in the "
            "--data JSON, or raise the second in the --model JSON"
        )
