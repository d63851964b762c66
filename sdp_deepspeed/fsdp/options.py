"""The keyword arguments of `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class ShardOptions:
    """Options of `fully_shard` that are passed to FSDP2.

    Args:
        reshard_after_forward: None means True for units and False for the root, as in FSDP2.
        ignored_params: parameters that are neither sharded nor averaged.
    """

    reshard_after_forward: bool | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored_params: frozenset[nn.Parameter] = frozenset()

    def arguments(self, *also_ignored: nn.Parameter) -> dict[str, Any]:
        """Keyword arguments for FSDP2."""
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "ignored_params": {*self.ignored_params, *also_ignored} or None,
        }

    def describe(self, module: nn.Module) -> str:
        """Text to compare across ranks."""
        ignored = sorted(name for name, parameter in module.named_parameters() if parameter in self.ignored_params)
        return f"{self.reshard_after_forward} {self.mp_policy} {self.offload_policy} ignores {ignored}"
