"""Shapes of the Llamas that are measured; embeddings are tied in all but LLAMAS."""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

# 6.6M parameters: 6.3M in 8 layers, the rest embeddings.
SMALL: Shape = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# 50.2M parameters: 49.6M in 10 layers, the rest embeddings of few tokens, so that logits are small.
LARGE: Shape = SMALL | {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
}
TINY: Shape = SMALL | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
MODELS = {"small": SMALL, "large": LARGE, "tiny": TINY}
# Untied, for GPUs.
_BILLION: Shape = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMAS: dict[str, Shape] = {
    "1B": _BILLION,
    "tiny": _BILLION | {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8},
}


def num_parameters(shape: Shape) -> int:
    """Parameters of a Llama whose key/value heads are as many as its heads."""
    width = shape["hidden_size"]
    layer = 4 * width * width + 3 * width * shape["intermediate_size"] + 2 * width
    return int(shape["num_hidden_layers"] * layer + shape["vocab_size"] * width + width)
