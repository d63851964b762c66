"""DeepSpeed's `safe_get_full_*` and `safe_set_full_*`: fp32 values and optimizer state of the dense model's parameters.

DeepSpeed's functions look for methods of the Parameter; without them they return None. Ours have methods that know the
engine. All data-parallel ranks call them together, as under plain ZeRO.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, locate
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED

_NO_GRADIENT = (
    "the gradient of {name!r} is averaged over its holders inside engine.step(), which drops it, so there is none to "
    "read or to change between backward and step; engine.get_global_grad_norm() gives the norm after the step"
)


@dataclass(frozen=True)
class FullTensors:
    """What is spread over the ranks of an engine without tensor parallelism.

    Args:
        optimizer: the engine's.
        rank_chunks: of the same engine.
        dp_group: the data-parallel group.
    """

    optimizer: SubnetworkOptimizer
    rank_chunks: RankChunks
    dp_group: Communicator

    def get(self, name: str, key: str | None = None) -> torch.Tensor:
        """The fp32 weights of a dense parameter, or its optimizer state `key`, on the device of the weights.

        Raises:
            ValueError: on all ranks: there is no such state.
        """
        if key is not None:
            run_on_all_ranks(self.dp_group, partial(self._check, key))
        result = torch.zeros(self.rank_chunks.shape(name), dtype=torch.float32, device=self.optimizer.exchange.device)
        for box, values in self._parts(name, key, owned=True):
            result[box.slices_in(Box.whole(result.shape))] = values.to(result)
        return self.dp_group.sum(result)

    @torch.no_grad()
    def set(self, name: str, value: torch.Tensor, key: str | None = None) -> None:
        """Inverse of `get`; every rank gives the same value, and writes what it has of it.

        Raises:
            ValueError: on all ranks: it has another shape, or there is no such state, yet or at all.
        """
        checks = partial(self._check_shape, name, value), partial(self._check_stepped, name, key)
        run_on_all_ranks(self.dp_group, partial(self._check, key), *checks)
        for box, own in self._parts(name, key, owned=False):
            own.copy_(value[box.slices_in(Box.whole(value.shape))])
        for stored, box, weight in self.rank_chunks.stored_weights() if key is None else ():
            if stored == name:
                weight.copy_(value[box.slices_in(Box.whole(value.shape))])

    def _check(self, key: str | None) -> None:
        kinds = sorted({kind for group in self.optimizer.groups for kind in self._states(group)})
        known = sorted({kind for own in self.dp_group.gather_objects(kinds) for kind in own})
        if key is not None and key not in known:
            here = f"here are {quoted(known)}" if known else "before the first step there is none"
            raise ValueError(f"there is no optimizer state {key!r} of single elements: {here}")

    def _check_shape(self, name: str, value: torch.Tensor) -> None:
        shape = tuple(self.rank_chunks.shape(name))
        if tuple(value.shape) != shape:
            raise ValueError(f"{name!r} of the dense model has shape {shape}, and the value has {tuple(value.shape)}")

    def _check_stepped(self, name: str, key: str | None) -> None:
        group = self.optimizer.groups[self.rank_chunks.tensors[name].group]
        for fragment, (index, _) in zip(group.fragments, group.places(), strict=True):
            state = self.optimizer.state.get(group.tensors[index], {})
            if key is not None and fragment.piece.parameter == name and key not in state:
                raise ValueError(
                    f"{name!r} was never stepped, so that it has no optimizer state {key!r} to be set: let it be "
                    "trained in a step first"
                )

    def _parts(self, name: str, key: str | None, *, owned: bool) -> Iterator[tuple[Box, torch.Tensor]]:
        """This rank's views of what it owns, or of all that it steps, of a dense tensor."""
        index = self.rank_chunks.tensors[name].group
        group, chunks = self.optimizer.groups[index], StateDict()
        group.link()
        tensors = group.tensors if key is None else self._states(group).get(key, [])
        fragments = [fragment for fragment in self._fragments(index, owned=owned) if fragment.piece.parameter == name]
        find = locate(group)
        if tensors:
            self.rank_chunks.add_stretches(chunks, "", fragments, lambda fragment: find(fragment, tensors))
        return iter([part for values in chunks.values() for part in values.items()])

    def _fragments(self, index: int, *, owned: bool) -> list[Fragment]:
        if not owned:
            return self.optimizer.groups[index].fragments
        exchange = self.optimizer.exchange
        shards = (shard for bucket in exchange.buckets for shard in exchange.owned(bucket))
        return [fragment for segment, fragments in shards if segment.group == index for fragment in fragments]

    def _states(self, group: SteppedGroup) -> Mapping[str, list[torch.Tensor]]:
        """By kind, laid out like `group.tensors`; zeros for tensors that were never stepped."""
        states = [self.optimizer.state.get(tensor, {}) for tensor in group.tensors]
        kinds = {
            kind
            for state, tensor in zip(states, group.tensors, strict=True)
            for kind, value in state.items()
            if torch.is_tensor(value) and value.shape == tensor.shape
        }
        return {
            kind: [
                torch.zeros_like(tensor.detach()) if state.get(kind) is None else state[kind]
                for state, tensor in zip(states, group.tensors, strict=True)
            ]
            for kind in kinds
        }


class _Access:
    """Methods of one Parameter; keeps nothing alive. A pickled Parameter has no engine."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = _no_engine if engine is None else weakref.ref(engine)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Access, (None, self._name)

    def _tensors(self) -> FullTensors:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(f"the engine that trained {self._name!r} is gone")
        tensors: FullTensors = engine.full_tensors()
        return tensors

    def get(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self._tensors().get(self._name, optim_state_key)

    def set(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        self._tensors().set(self._name, value, optim_state_key)

    def no_gradient(self, *_: Any) -> NoReturn:
        raise RuntimeError(_NO_GRADIENT.format(name=self._name))


def _no_engine() -> None:
    """As a reference to an engine that is gone."""


def install_full_access(engine: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Give parameters what DeepSpeed's functions look for; once, when the engine is complete.

    Args:
        parameters: by dense name; those that no optimizer has stay as they are, as in DeepSpeed.
    """
    for info in engine.optimizer.model.tensors:
        if info.group != NOT_OPTIMIZED:
            parameter: Any = parameters[info.name]
            access = _Access(engine, info.name)
            parameter._hp_mapping = None  # there: DeepSpeed's functions then call the methods
            parameter._hp_grad = access  # not None: they do not give back this rank's own gradient
            parameter.get_full_hp_param, parameter.set_full_hp_param = access.get, access.set
            parameter.get_full_hp_grad = parameter.set_full_hp_grad = access.no_gradient
