"""Folders in Hugging Face format: the dense model of a checkpoint or of a live run as one, and a start from one."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_facts(model: nn.Module) -> dict[str, Any]:
    """What makes a model of Transformers from its weights: its class, and JSON of its configs. Empty for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(model, "save_pretrained"):
        return {}
    generation: Any = getattr(model, "generation_config", None)
    return {
        "class": type(model).__name__,
        "config": config.to_json_string(use_diff=False),
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
    }
