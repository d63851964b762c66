"""The FSDP2 host: each unit is sharded over its holders."""

from sdp_deepspeed.fsdp.checkpoint_manager import CheckpointManager
from sdp_deepspeed.fsdp.clip_grad_norm import clip_grad_norm_
from sdp_deepspeed.fsdp.export import full_state_dict, reestimate_batch_norm, save_pretrained
from sdp_deepspeed.fsdp.param_groups_by_mesh import param_groups
from sdp_deepspeed.fsdp.shard import fully_shard
from sdp_deepspeed.fsdp.sharded_model import sharded_model_of

__all__ = [
    "CheckpointManager",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "param_groups",
    "reestimate_batch_norm",
    "save_pretrained",
    "sharded_model_of",
]
