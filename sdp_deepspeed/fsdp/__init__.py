"""The FSDP2 host: each unit is sharded over its holders. Modules are imported lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
__all__ = [
    "CheckpointManager",
    "clip_grad_norm_",
    "dense",
    "full_state_dict",
    "fully_shard",
    "param_groups",
    "reestimate_batch_norm",
    "save_pretrained",
    "sharded_model_of",
]

if TYPE_CHECKING:
    from sdp_deepspeed.fsdp.checkpoints import CheckpointManager
    from sdp_deepspeed.fsdp.clip import clip_grad_norm_, param_groups
    from sdp_deepspeed.fsdp.export import dense, full_state_dict, reestimate_batch_norm, save_pretrained
    from sdp_deepspeed.fsdp.shard import fully_shard
    from sdp_deepspeed.fsdp.sharded_model import sharded_model_of
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
