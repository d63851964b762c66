"""Subnetwork Data Parallelism for DeepSpeed.

Importing this package is enough: `deepspeed.initialize` then honors the block `subnetwork_data_parallel` of an
ordinary DeepSpeed config. Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any

from sdp_deepspeed.engine import import_hook
from sdp_deepspeed.version import __version__

__all__ = ["Init", "Plan", "__version__", "fully_shard", "initialize"]

import_hook.arm()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with the block honored: same arguments, same results."""
    import deepspeed

    return deepspeed.initialize(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from sdp_deepspeed.plan.plan import Plan

        return Plan
    if name == "Init":
        from sdp_deepspeed.deferred_init.init import Init

        return Init
    if name == "fully_shard":
        from sdp_deepspeed.fsdp.shard import fully_shard

        return fully_shard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
