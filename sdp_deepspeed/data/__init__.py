"""Text to batches: corpus, tokenizer, held-out split, packed blocks, shards per data-parallel rank.

`build(DataConfig(...), micro_batch=..., rank=..., world_size=...)` is the whole interface for a
training program; `sdp data <data.json>` prepares a large corpus beforehand.
"""

from sdp_deepspeed.data.bundle import DataBundle, build
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.loader import PackedBatches, ValidationBatch, ValidationBatches
from sdp_deepspeed.data.packing import PreparedDataError

__all__ = [
    "DataBundle",
    "DataConfig",
    "PackedBatches",
    "PreparedDataError",
    "ValidationBatch",
    "ValidationBatches",
    "build",
]
