"""Subnetwork Data Parallelism for DeepSpeed.

Importing this package is enough: `deepspeed.initialize` then honours the block `subnetwork_data_parallel` of an
ordinary DeepSpeed config. Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any

from . import seam
from .version import __version__

__all__ = ["Init", "Plan", "__version__", "initialize"]

seam.arm()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with the block honoured: same arguments, same results."""
    import deepspeed

    return deepspeed.initialize(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from .plan import Plan

        return Plan
    if name == "Init":
        from .deferred import Init

        return Init
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
