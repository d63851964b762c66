"""Where this rank's shards lie in the dense model: weights as chunks, to write and to fill.

A shard is some rows of a tensor that may itself be intervals of a dense tensor, or a tensor-parallel rank's part of it:
one box of the dense tensor for each interval that it has a part of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from sdp_deepspeed.checkpoint.state.boxes import Box, in_dense
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.shard_regions import Part, parts_of_shard
from sdp_deepspeed.fsdp.sharded_model import ShardedModel
from sdp_deepspeed.fsdp.wrappers import without_wrappers
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.shards import Shards
from sdp_deepspeed.plan.tensors import TensorInfo, named_tensors, pieces_by_tensor
from sdp_deepspeed.units import Piece


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has, sharing their memory; whether in a parameter, or in an optimizer's state."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class LocalTensor:
    """What this rank has of a dense tensor in one tensor of its own.

    Args:
        name: dense.
        tensor: the module's, maybe a DTensor.
        parts: of the dense tensor, and where they are in the local one.
    """

    name: str
    tensor: torch.Tensor
    parts: tuple[Part, ...]

    def chunks(self, like: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Boxes of the dense tensor with their elements.

        Args:
            like: the tensor, or state of an optimizer that has the same elements.
        """
        local = local_of(like.detach())
        whole = Box.whole(local.shape)
        for box, inside in self.parts:
            yield box, local[inside.slices_in(whole)]


@dataclass(frozen=True)
class Replicated:
    """What each of some ranks has: whole a buffer, or what FSDP2 was told to ignore, which nobody averages; a shard of
    what tensor-parallel ranks do not divide.

    Args:
        writes: whether this rank is the one that writes it.
    """

    local: LocalTensor
    writes: bool


class LocalChunks:
    """Chunks of this rank.

    Args:
        tensors: of the dense model, those that this rank lacks too: parameters and persistent buffers.
        sharded: what this rank alone has of parameters that FSDP2 shards.
        replicated: what it has beside that.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo], sharded: Sequence[LocalTensor], replicated: Sequence[Replicated] = ()
    ) -> None:
        self._tensors = {info.name: info for info in tensors}
        self._sharded, self._replicated = sharded, replicated

    @classmethod
    def of(cls, sharded: ShardedModel) -> LocalChunks:
        """Of a model, which is resharded for it.

        Raises:
            ValueError: it has tensors that no checkpoint of the dense model has a place for.
        """
        sharded.reshard()
        model, shards, held = sharded.rank_model, sharded.shards, sharded.held_tensors()
        own: list[LocalTensor] = []
        of_all: list[Replicated] = []
        turns = {info.name: (info.shape, index % shards.size) for index, info in enumerate(model.tensors)}
        for tensor in held:
            name, parameter = tensor.dense_name, sharded.parameter(tensor)
            shape, turn = turns[name]  # of this tensor-parallel rank's part
            _check_shard(tensor, parameter, tensor.shape(shape))
            parts = parts_of_shard(tensor, sharded.rank, shape)
            local = LocalTensor(name, parameter, tuple((in_dense(box, Piece(name), shards), at) for box, at in parts))
            if shards.size == 1 or name in shards.divisions:
                own.append(local)
            else:
                of_all.append(Replicated(local, writes=turn == shards.index))
        with without_wrappers(sharded.module):
            buffers, everything = _buffers(sharded.module, model.views.shapes), named_tensors(sharded.module)
        not_ignored = {tensor.dense_name for tensor in held}
        not_ignored |= {piece.parameter for unit in model.plan.units for piece in unit.pieces}
        ignored = [info for info in model.tensors if info.name not in not_ignored]
        of_all += _replicated(sharded, [*ignored, *buffers], everything)
        return cls([*(_in_dense_shape(info, shards) for info in model.tensors), *buffers], own, of_all)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of the dense model, by dense name."""
        return self._tensors

    @property
    def local_tensors(self) -> list[LocalTensor]:
        """All that this rank has; of parameters, those that an optimizer may have."""
        return [*self._sharded, *(other.local for other in self._replicated)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the dense tensor."""
        return self._tensors[name].shape

    def stored_weights(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """All that this rank stores: dense name, where it lies in the dense tensor, and its live values."""
        for local in self.local_tensors:
            for box, values in local.chunks(local.tensor):
                yield local.name, box, values

    def written_weights(self, *, exclude_frozen: bool) -> StateDict:
        """Weights that this rank writes: shards are disjoint, and of what is replicated one rank writes each.

        Args:
            exclude_frozen: leave out parameters that need no gradients.
        """
        result: StateDict = {}
        for local in self.written_tensors():
            info = self._tensors[local.name]
            if not (exclude_frozen and info.kind == "parameter" and not info.trainable):
                self.add(result, WEIGHT, local, local.tensor)
        return result

    def written_tensors(self) -> Iterator[LocalTensor]:
        """Those of which this rank writes what it has."""
        yield from self._sharded
        yield from (other.local for other in self._replicated if other.writes)

    def add(self, target: StateDict, kind: str, local: LocalTensor, like: torch.Tensor) -> None:
        """Add to `target` what a local tensor, or state like it, has of the dense tensor."""
        for box, values in local.chunks(like):
            chunks = target.setdefault(f"{kind}/{local.name}", Chunks(self.shape(local.name), values.dtype))
            chunks.add(box, values)

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this rank stores, on the host; each rank's own, but for statistics of batch norms."""
        return {local.name: local_of(local.tensor.detach()).cpu() for local in self._local_buffers()}

    @torch.no_grad()
    def restore_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `own_buffers`; maybe another host's, which stored more or fewer of them whole."""
        for local in self._local_buffers():
            if local.name in buffers:
                local_of(local.tensor).copy_(buffers[local.name])

    def _local_buffers(self) -> Iterator[LocalTensor]:
        for other in self._replicated:
            if self._tensors[other.local.name].kind == "buffer":
                yield other.local


def _in_dense_shape(info: TensorInfo, shards: Shards) -> TensorInfo:
    division = shards.divisions.get(info.name)
    return info if division is None else replace(info, shape=division.shape)


def _check_shard(held: HeldTensor, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """ValueError for what is not sharded as `HeldTensor` says."""
    is_sharded = isinstance(parameter, DTensor) and tuple(parameter.placements) == (Shard(0),)
    if not is_sharded or tuple(parameter.shape) != shape:
        kind: Any = getattr(parameter, "placements", type(parameter).__name__)
        raise ValueError(
            f"checkpoint: {held.name!r} is {kind} of shape {list(parameter.shape)}, and sdp_deepspeed.fully_shard made "
            f"it one of shape {list(shape)} that is sharded along dim 0; leave parameters as it made them, and do not "
            "give it those of units in ignored_params"
        )


def _buffers(module: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> list[TensorInfo]:
    """Persistent ones, with their dense shapes."""
    try:
        return persistent_buffers(module, shapes)
    except KeyError as problem:
        raise ValueError(
            f"checkpoint: the dense model had no buffer {quoted([problem.args[0]])} when sdp_deepspeed.fully_shard was "
            "called; register it before, or with persistent=False"
        ) from None


def _replicated(
    sharded: ShardedModel, infos: Collection[TensorInfo], everything: Mapping[str, torch.Tensor]
) -> Iterator[Replicated]:
    """Those that this rank has, each written by one of its holders, and one of their tensor-parallel ranks, in turn.

    Args:
        everything: in the module, by dense name.
    """
    shards = sharded.shards
    shapes = {info.name: info.shape for info in infos}
    for count, ((_, name), pieces) in enumerate(pieces_by_tensor(tuple(infos), sharded.plan).items()):
        holders = set(range(sharded.mesh.size())).intersection(*(ranks for _, ranks in pieces))
        if len(pieces) > 1 or not holders:
            raise ValueError(f"checkpoint: {name!r} is a buffer in parts, which sdp_deepspeed.fully_shard does not cut")
        if sharded.rank in holders:
            whole = Box.whole(shapes[name])
            turn, place = divmod(count, len(holders))
            writer = sorted(holders)[place], turn % shards.size
            parts = ((whole, whole),) if whole.num_elements else ()
            yield Replicated(LocalTensor(name, everything[name], parts), writer == (sharded.rank, shards.index))


def persistent_buffers(
    module: torch.nn.Module, shapes: Mapping[str, Sequence[int]], *, also: Collection[str] = ()
) -> list[TensorInfo]:
    """Buffers that state dicts have.

    Args:
        shapes: of the buffers before units were dropped, by name.
        also: names of others, which come last: who writes a buffer depends on those before it.
    """
    persistent: list[TensorInfo] = []
    others: list[TensorInfo] = []
    for prefix, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is None:
                continue
            if name not in inner._non_persistent_buffers_set:
                persistent.append(_buffer(path, shapes[path], buffer))
            elif path in also:
                others.append(_buffer(path, shapes[path], buffer))
    return persistent + others


def _buffer(path: str, shape: Sequence[int], buffer: torch.Tensor) -> TensorInfo:
    return TensorInfo(path, tuple(shape), buffer.dtype, kind="buffer", trainable=False)
