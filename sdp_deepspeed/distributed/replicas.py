"""Do ranks that must have the same tensors have the same bits?

A tensor's bytes are reduced on its own device, by sums; only those are hashed on the host. With the bytes as 64-bit
words x_i, and fixed random weights w_i (odd) and v_i, a row of words becomes the sums of w_i x_i and of
v_i (x_i >> 32), modulo 2^64. Rows that differ in one word have different sums, as odd weights can be inverted; of other
rows that nobody made with the weights in mind, at most one pair in 2^32 has the same. The second sum is for differences
in high bits alone, such as signs, of which products keep little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.messages import listed

_ROW = 1 << 14  # words
_ROWS_ON_CPU, _ROWS_ON_GPU = 4, 256  # at once: what fits into a cache; temporaries of 32 MiB


def digests(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """What tells the contents of tensors apart, 16 bytes for each; the order of a tensor's elements counts.

    Equal for equal bits on any device. Tensors on a GPU are not copied to the host.
    """
    weights = cache(_weights)  # for each device once, and gone after this
    sums = [_sums(tensor.detach(), weights(tensor.device)) for tensor in tensors]
    if not sums:
        return []
    on_host = torch.cat([part for parts in sums for part in parts]).cpu()  # one copy, for which the host waits once
    result, start = [], 0
    for parts in sums:
        stop = start + sum(map(len, parts))
        result.append(hashlib.sha256(on_host[start:stop].numpy().tobytes()).digest()[:16])
        start = stop
    return result


def differing_replicas(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> str:
    """Names of tensors that are not the same on all ranks of a group, for people; empty if all are. Every rank of the
    group calls it with the same names."""
    own = dict(zip(tensors, digests(tensors.values()), strict=True))
    gathered = communicator.gather_objects(own)
    return listed([name for name in gathered[0] if any(other.get(name) != gathered[0][name] for other in gathered)])


def _sums(tensor: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Vectors of int64 on the tensor's device: the number of bytes, the sums of each row."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = _words(data)
    whole = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    rest = words[whole.numel() :].view(1, -1)
    parts = [torch.full((1,), len(data), dtype=torch.int64, device=data.device)]
    at_once, weighted = (_ROWS_ON_CPU, torch.mv) if data.device.type == "cpu" else (_ROWS_ON_GPU, _weighted_sums)
    for rows in (*whole.split(at_once), rest):
        first, second = weights[:, : rows.shape[1]]
        parts += [weighted(rows, first), weighted(rows >> 32, second)]
    return parts


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as int64, the last one filled up with zeros; without a copy where they begin and end at a word."""
    if len(data) % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _weighted_sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What `torch.mv` gives, which for integers is there on CPUs only."""
    return (rows * weights).sum(1)


def _weights(device: torch.device) -> torch.Tensor:
    """[2, words of a row], the same on every rank."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    low, high = torch.randint(1 << 32, (2, 2, _ROW), dtype=torch.int64, device="cpu", generator=generator)
    weights = low | high << 32
    weights[0] |= 1
    return weights.to(device)
