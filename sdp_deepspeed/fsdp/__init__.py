"""The FSDP2 host: each unit is sharded over its holders. Modules are imported lazily."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "CheckpointManager": "checkpoints",
    "clip_grad_norm_": "clip",
    "dense": "export",
    "full_state_dict": "export",
    "fully_shard": "shard",
    "param_groups": "clip",
    "reestimate_batch_norm": "export",
    "save_pretrained": "export",
    "sharded_model_of": "sharded_model",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
