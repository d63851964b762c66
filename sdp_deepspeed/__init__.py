"""Subnetwork data parallelism for DeepSpeed and FSDP2.

After `import sdp_deepspeed`, `deepspeed.initialize` honors the block `subnetwork_data_parallel` of a DeepSpeed config.
For FSDP2, use `fully_shard`, which does not need DeepSpeed. This module imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.engine import import_hook
from sdp_deepspeed.version import __version__

__all__ = [
    "Init",
    "Plan",
    "__version__",
    "check_description",
    "fully_shard",
    "join",
    "reestimate_batch_norm",
    "trace",
]

import_hook.arm()


_MODULES = {
    "Init": "init",
    "Plan": "plan.plan",
    "check_description": "masking.check_description",
    "fully_shard": "fsdp.shard",
    "join": "teams.join",
    "reestimate_batch_norm": "either_host",
    "trace": "architectures.examples",
}

if TYPE_CHECKING:
    from sdp_deepspeed.architectures.examples import trace
    from sdp_deepspeed.either_host import reestimate_batch_norm
    from sdp_deepspeed.fsdp.shard import fully_shard
    from sdp_deepspeed.init import Init
    from sdp_deepspeed.masking.check_description import check_description
    from sdp_deepspeed.plan.plan import Plan
    from sdp_deepspeed.teams.join import join
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
