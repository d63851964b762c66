"""Subnetwork data parallelism for DeepSpeed and FSDP2.

After `import sdp_deepspeed`, `deepspeed.initialize` honors the block `subnetwork_data_parallel` of a DeepSpeed config.
For FSDP2, use `fully_shard`, which does not need DeepSpeed. This module imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

from sdp_deepspeed.engine import import_hook
from sdp_deepspeed.messages import NEEDS_DEEPSPEED, lacks_deepspeed
from sdp_deepspeed.version import __version__

__all__ = [
    "Init",
    "Plan",
    "__version__",
    "check_description",
    "fully_shard",
    "initialize",
    "reestimate_batch_norm",
]

import_hook.arm()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with support for the block: the same arguments and results.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if not lacks_deepspeed(error):
            raise
        what = f"sdp_deepspeed.initialize {NEEDS_DEEPSPEED}; sdp_deepspeed.fully_shard does not"
        raise ModuleNotFoundError(what, name=error.name) from None

    return deepspeed.initialize(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from sdp_deepspeed.plan.plan import Plan

        return Plan
    if name == "Init":
        from sdp_deepspeed.init import Init

        return Init
    if name == "check_description":
        from sdp_deepspeed.masking.description import check_description

        return check_description
    if name == "fully_shard":
        from sdp_deepspeed.fsdp.shard import fully_shard

        return fully_shard
    if name == "reestimate_batch_norm":
        from sdp_deepspeed.batch_norm import reestimate_batch_norm

        return reestimate_batch_norm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
