"""Names of the files of a checkpoint, of those beside it, and of the tensors in it."""

from __future__ import annotations

LATEST = "latest"  # beside the checkpoints: the tag that is loaded when none is asked for
MANIFEST = "manifest.json"
INDEX = "tensors.json"
COMMON = "common.pt"
PLAN = "plan.json"
CONFIG = "config.json"
MODEL_CONFIG = "model_config.json"
GENERATION_CONFIG = "generation_config.json"

# A key is "<kind>/<dense name>"; kinds beside these are moments, by the optimizer's own names.
WEIGHT, MASTER = "weight", "master"


def tensors_file(rank: int) -> str:
    """Chunks of dense tensors that this rank wrote."""
    return f"tensors_{rank:05d}.safetensors"


def rank_file(rank: int) -> str:
    """What only this rank has: random numbers and buffers."""
    return f"rank_{rank:05d}.pt"
