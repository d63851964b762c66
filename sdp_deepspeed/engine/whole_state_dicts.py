"""State dicts with whole tensors for a model that is divided among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from sdp_deepspeed.plan.tensor_parallel_shards import TensorParallelShards


class WholeStateDicts:
    """Hooks that gather tensors in `state_dict` and narrow them in `load_state_dict`, of a model and its submodules.

    Args:
        group: tensor-parallel process group; None without tensor parallelism.
    """

    def __init__(self, model: nn.Module, shards: TensorParallelShards, group: dist.ProcessGroup | None) -> None:
        self._shards, self._group, self._are_whole = shards, group, False
        names = {id(p): name for name, p in model.named_parameters() if name in shards.divisions}
        for module in model.modules():
            divided = {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
            if divided:
                module.register_state_dict_post_hook(partial(self._gather, divided))
                module.register_load_state_dict_pre_hook(partial(self._narrow, divided))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which `state_dict` returns whole tensors, a collective of the group, and `load_state_dict` accepts
        them. Outside, both use this rank's shards."""
        before, self._are_whole = self._are_whole, True
        try:
            yield
        finally:
            self._are_whole = before

    def _gather(self, divided: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if not self._are_whole:
            return
        assert self._group is not None
        for attribute, name in divided.items():
            key = prefix + attribute
            if key != name and name in state:  # tied to another key
                state[key] = state[name]
            elif key in state:
                state[key] = self._shards.join(name, state[key].detach(), self._group)

    def _narrow(self, divided: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if not self._are_whole:
            return
        for attribute, name in divided.items():
            key = prefix + attribute
            if key in state and tuple(state[key].shape) == self._shards.divisions[name].shape:
                state[key] = self._shards.part(name, state[key])
