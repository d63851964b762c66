"""State dicts of a model that tensor-parallel ranks divide: whole tensors on every rank, when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.plan.shards import Division, Shards


class StateDicts:
    """Gathers and narrows what goes through `state_dict` and `load_state_dict` of a model and of its parts.

    Args:
        communicator: the tensor-parallel group.
        shards: who stores what.
    """

    def __init__(self, communicator: Communicator, shards: Shards) -> None:
        self._communicator = communicator
        self._shards = shards
        self._is_whole = False

    def install(self, model: nn.Module) -> None:
        """Hook every module of the divided `model` that has a divided parameter; called once."""
        names = {id(p): name for name, p in model.named_parameters() if name in self._shards.divisions}
        for module in model.modules():
            own = {attribute: names[id(p)] for attribute, p in module._parameters.items() if id(p) in names}
            if own:
                module.register_state_dict_post_hook(partial(self._gather, own))
                module.register_load_state_dict_pre_hook(partial(self._narrow, own))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, `state_dict` gives whole tensors, a collective of the group, and `load_state_dict` takes them;
        outside both mean this rank's shards."""
        previous, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = previous

    @torch.no_grad()
    def _gather(self, own: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if not self._is_whole:
            return
        for attribute, name in own.items():
            key = prefix + attribute
            if key != name and name in state:  # tied to what is there already
                state[key] = state[name]
            elif key in state:
                state[key] = self._whole(name, state[key].detach())

    def _whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        division = self._shards.divisions[name]
        if not division.is_known:
            raise RuntimeError(
                f"{name} is divided among tensor-parallel ranks along nobody knows which dim; set its attribute "
                "partition_dim to that, so that state dicts can be gathered"
            )
        whole = shard.new_zeros(division.shape)
        self._own_part(division, whole).copy_(shard)
        return self._communicator.sum(whole)  # exact, as all others add zeros; and shards need not have one size

    def _narrow(self, own: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for attribute, name in own.items():
            key, division = prefix + attribute, self._shards.divisions[name]
            if self._is_whole and key in state and tuple(state[key].shape) == division.shape:
                state[key] = self._own_part(division, state[key])

    def _own_part(self, division: Division, whole: torch.Tensor) -> torch.Tensor:
        index = self._shards.index
        return whole.narrow(division.dim, sum(division.lengths[:index]), division.lengths[index])
