"""The FSDP2 host: each unit is sharded over its holders (README.md beside this file). Imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "CheckpointManager": "checkpoints",
    "clip_grad_norm_": "norm",
    "dense": "dense_view",
    "full_state_dict": "full_state",
    "fully_shard": "shard",
    "param_groups": "mesh_groups",
    "reestimate_batch_norm": "dense_view",
    "save_pretrained": "full_state",
    "sharded_model_of": "sharded_model",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
