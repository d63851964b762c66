"""Text to batches: corpus, tokenizer, held-out split, packed blocks, shards per data-parallel rank.

`build(DataConfig(...), micro_batch=..., rank=..., world_size=...)` is the whole interface for a training program;
`sdp data <data.json>` prepares a large corpus beforehand. Nothing heavy is imported here: processes that tokenize need
no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdp_deepspeed.data.bundle import DataBundle, build
    from sdp_deepspeed.data.config import DataConfig
    from sdp_deepspeed.data.loader import PackedBatches, ValidationBatch, ValidationBatches
    from sdp_deepspeed.data.prepared import PreparedDataError

__all__ = [
    "DataBundle",
    "DataConfig",
    "PackedBatches",
    "PreparedDataError",
    "ValidationBatch",
    "ValidationBatches",
    "build",
]
_MODULES = {
    "DataBundle": "bundle",
    "build": "bundle",
    "DataConfig": "config",
    "PackedBatches": "loader",
    "ValidationBatch": "loader",
    "ValidationBatches": "loader",
    "PreparedDataError": "prepared",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"sdp_deepspeed.data.{_MODULES[name]}"), name)
