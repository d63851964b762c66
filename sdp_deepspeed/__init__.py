"""Subnetwork data parallelism for DeepSpeed and FSDP2.

After `import sdp_deepspeed`, `deepspeed.initialize` honors the block `subnetwork_data_parallel` of a DeepSpeed config.
For FSDP2, use `fully_shard`, which does not need DeepSpeed. This module imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


_MODULES = {
    "Init": "init",
    "Plan": "plan.plan",
    "check_description": "masking.description",
    "fully_shard": "fsdp.shard",
    "reestimate_batch_norm": "batch_norm",
}

if TYPE_CHECKING:
    from sdp_deepspeed.batch_norm import reestimate_batch_norm
    from sdp_deepspeed.fsdp.shard import fully_shard
    from sdp_deepspeed.init import Init
    from sdp_deepspeed.masking.description import check_description
    from sdp_deepspeed.plan.plan import Plan
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
