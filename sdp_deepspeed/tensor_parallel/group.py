"""Ranks that train one copy of a subnetwork together: what the optimizer must know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.distributed.communicator import Communicator


@dataclass(frozen=True)
class TensorParallelGroup:
    """A tensor-parallel group; its ranks hold the same units and see the same batches.

    Args:
        communicator: the tensor-parallel group of this rank.
        sharded: dense names of parameters of which each rank of the group has its own shard. All others are replicated:
            the gradient norm counts them once.
        partial_gradients: replicated parameters of which each rank computes only a summand of the gradient (per-head
            norms, of which each rank sees its own heads).
    """

    communicator: Communicator
    sharded: frozenset[str]
    partial_gradients: frozenset[str] = frozenset()

    def counts_in_norm(self, name: str) -> bool:
        """Whether this rank counts the parameter in the gradient norm."""
        return name in self.sharded or self.communicator.rank == 0

    def sum_partial_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
        """From now on each gradient in `partial_gradients` is summed over the group before it is accumulated.

        Returns:
            What ends that.
        """
        summands = (parameters[name] for name in sorted(self.partial_gradients))
        return [
            parameter.register_hook(lambda gradient: self.communicator.sum(gradient.clone()))
            for parameter in summands
            if parameter.requires_grad
        ]
