"""Files of a checkpoint for whoever takes it for one of DeepSpeed's own: their errors then say whose it is.

Without the package DeepSpeed finds no file of its own and fails with an empty assertion; its `zero_to_fp32` says that
files are missing. Both print what they read in these files where they expect a number.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import torch

_OURS = "this is a checkpoint of sdp_deepspeed"
MODEL_FILE = "mp_rank_00_model_states.pt"  # what DeepSpeedEngine.load_checkpoint opens
OPTIMIZER_FILE = "sdp_deepspeed_optim_states.pt"  # what zero_to_fp32 opens, as any file with this ending
TO_RESUME = (
    f"({_OURS}: `import sdp_deepspeed` before deepspeed.initialize, with the block "
    "subnetwork_data_parallel in the config; for plain DeepSpeed `sdp checkpoint export` writes the weights)"
)
TO_EXPORT = f"no files ({_OURS}: use `sdp checkpoint export <this folder> <new folder>`) instead"


@cache
def signposts() -> dict[str, bytes]:
    """Contents by name of file."""
    optimizer = {"zero_stage": 1, "partition_count": TO_EXPORT}
    # zero_to_fp32 reads these first, and goes on to the other file.
    nothing: dict[str, Any] = {"module": {}, "buffer_names": [], "param_shapes": [], "shared_params": {}}
    return {
        MODEL_FILE: _saved({"mp_world_size": TO_RESUME, **nothing}),
        OPTIMIZER_FILE: _saved({"optimizer_state_dict": optimizer}),
    }


def _saved(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
