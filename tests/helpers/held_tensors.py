"""What ranks hold of dense tensors under FSDP2, made by hand: without process groups, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sdp_deepspeed.fsdp.local_chunks import LocalChunks, LocalTensor
from sdp_deepspeed.fsdp.pieces import HeldTensor, rows_of
from sdp_deepspeed.fsdp.shard_regions import parts_of_shard

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.plan.tensors import TensorInfo

Dense = Mapping[str, torch.Tensor]
Cut = Sequence[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]
"""Intervals along a dim with the ranks that hold them."""


def whole(name: str, *holders: int) -> HeldTensor:
    return HeldTensor(name, name, None, (), holders)


def cut(name: str, dim: int, parts: Cut) -> list[HeldTensor]:
    """One tensor for each holder set."""
    return [HeldTensor(f"{name}.{i}", name, dim, *part) for i, part in enumerate(parts)]


def tensor_of(held: HeldTensor, dense: torch.Tensor) -> torch.Tensor:
    """What FSDP2 shards."""
    if held.dim is None:
        return dense
    return torch.cat([dense.narrow(held.dim, start, length) for start, length in held.intervals], held.dim)


def shard_of(held: HeldTensor, rank: int, dense: torch.Tensor) -> torch.Tensor:
    """As FSDP2 cuts it: `torch.chunk` along the first dim, and nothing for holders beyond the chunks."""
    full = tensor_of(held, dense)
    chunks = torch.chunk(full, len(held.holders))
    position = held.holders.index(rank)
    shard = chunks[position] if position < len(chunks) else full[:0]
    start, stop = rows_of(position, len(held.holders), full.shape[0])
    assert torch.equal(shard, full[start:stop])
    return shard.clone()


def infos_of(dense: Dense, frozen: Sequence[str] = ()) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(t.shape), t.dtype, trainable=name not in frozen) for name, t in dense.items()]


def chunks_of(rank: int, layout: Sequence[HeldTensor], dense: Dense, frozen: Sequence[str] = ()) -> LocalChunks:
    """Of one rank, with parameters that have the dense values."""
    tensors = []
    for held in layout:
        if rank in held.holders:
            values = dense[held.dense_name]
            shard = torch.nn.Parameter(shard_of(held, rank, values), requires_grad=held.dense_name not in frozen)
            parts = tuple(parts_of_shard(held, rank, values.shape))
            tensors.append(LocalTensor(held.dense_name, shard, parts))
    return LocalChunks(infos_of(dense, frozen), tensors)


def parameters_of(chunks: LocalChunks) -> list[torch.nn.Parameter]:
    return [tensor for local in chunks.local_tensors if isinstance(tensor := local.tensor, torch.nn.Parameter)]


def assembled(states: Sequence[StateDict]) -> dict[str, torch.Tensor]:
    """Dense tensors by key, from what all ranks write; each element by one of them."""
    result: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for state in states:
        for key, chunks in state.items():
            written = times.setdefault(key, torch.zeros(chunks.shape, dtype=torch.int32))
            values = result.setdefault(key, torch.zeros(chunks.shape, dtype=chunks.dtype))
            for box, own in chunks.items():
                inside = box.slices_in(Box.whole(chunks.shape))
                written[inside] += 1
                values[inside] = own.detach()
    wrong = [key for key, count in times.items() if not bool((count == 1).all())]
    assert not wrong, wrong
    return result


@torch.no_grad()
def fill_from(dense: Dense, state: StateDict) -> None:
    """What reading a checkpoint does to targets."""
    for key, chunks in state.items():
        for box, values in chunks.items():
            values.copy_(dense[key][box.slices_in(Box.whole(chunks.shape))])
