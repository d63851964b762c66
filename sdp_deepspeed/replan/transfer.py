"""Boxes from their owners to the ranks that asked for them: uneven all-to-alls of bytes, no more than a bucket in each.

Each pair of ranks has an equal part of the bucket, so both ends know what is in a round from the requests alone. All
ranks go through the same number of rounds, also those that need nothing. Nothing but collectives of the data-parallel
group is in between: who waits in one hears of a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.replan.catalog import Catalog
from sdp_deepspeed.replan.requests import Questions, Request
from sdp_deepspeed.replan.share import Share, halves

_ALIGNMENT = 16  # bytes: NCCL copies single ones elsewhere
_LEAST = 4096  # bytes of a pair in a round


@dataclass(frozen=True)
class Item:
    """What goes from one rank to another, or comes from it.

    Args:
        values: a view of live state.
        dtype: in which it travels.
    """

    values: torch.Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize


class Transfer:
    """Every rank of the group makes one and calls `run`.

    Args:
        dp_group: the data-parallel group.
        device: of its buffers.
        bucket_bytes: most that a rank packs for one collective, and most that it gets in one.

    Attributes:
        sent_bytes: by this rank: values.
        asked_bytes: by this rank: requests, and how many rounds there are.
    """

    def __init__(self, dp_group: Communicator, *, device: torch.device, bucket_bytes: int) -> None:
        self._dp_group = dp_group
        self._device = device
        self._limit = max(_LEAST, bucket_bytes // dp_group.size)
        self.sent_bytes = self.asked_bytes = 0

    @torch.no_grad()
    def run(self, share: Share, owned: StateDict, catalog: Catalog) -> None:
        """Fill the places of `share`; a collective.

        Args:
            owned: what this rank sends.
        """
        questions = Questions(self._dp_group, device=self._device, keys=sorted(catalog.shapes))
        asked = questions.exchange(share.requests)
        incoming = (zip(share.requests.get(rank, ()), share.places.get(rank, ()), strict=True) for rank in self._ranks)
        outgoing = (((request, _values(request, owned)) for request in of_rank) for of_rank in asked)
        coming, leaving = (
            [list(self._rounds(self._items(of_rank, catalog))) for of_rank in of_ranks]
            for of_ranks in (incoming, outgoing)
        )
        num_rounds = max(questions.numbers([max(map(len, coming))] * self._dp_group.size))
        self.asked_bytes = questions.sent_bytes
        for number in range(num_rounds):
            self._round(_of_round(leaving, number), _of_round(coming, number))

    @property
    def _ranks(self) -> range:
        return range(self._dp_group.size)

    def _items(self, parts: Iterable[tuple[Request, torch.Tensor]], catalog: Catalog) -> Iterator[Item]:
        """Of requests with their values or places, none larger than a pair's part of a bucket; in an order that both
        ends know."""
        for request, values in parts:
            dtype = catalog.dtypes[request.key]
            for box in halves(request.box, self._limit // dtype.itemsize):
                yield Item(values[box.slices_in(request.box)], dtype)

    def _rounds(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        found: list[Item] = []
        num_bytes = 0
        for item in items:
            if found and num_bytes + item.num_bytes > self._limit:
                yield found
                found, num_bytes = [], 0
            found.append(item)
            num_bytes += item.num_bytes
        if found:
            yield found

    def _round(self, leaving: Sequence[Sequence[Item]], coming: Sequence[Sequence[Item]]) -> None:
        sent_splits, received_splits = [[_aligned(items) for items in of_ranks] for of_ranks in (leaving, coming)]
        sent, received = self._bytes(sum(sent_splits)), self._bytes(sum(received_splits))
        for items, part in zip(leaving, sent.split(sent_splits), strict=True):
            for item, place in _places(items, part):
                place.copy_(_as_bytes(item.values.contiguous()))
        self._dp_group.all_to_all(received, sent, received_splits, sent_splits).wait()
        self.sent_bytes += sum(sent_splits)
        for items, part in zip(coming, received.split(received_splits), strict=True):
            for item, place in _places(items, part):
                whole = torch.empty(item.values.shape, dtype=item.dtype, device=self._device)
                _as_bytes(whole).copy_(place)
                item.values.copy_(whole)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)


def _of_round(messages: Sequence[Sequence[Sequence[Item]]], number: int) -> list[Sequence[Item]]:
    """By rank; nothing where a rank has no more."""
    return [of_rank[number] if number < len(of_rank) else () for of_rank in messages]


def _values(request: Request, owned: StateDict) -> torch.Tensor:
    values = owned[request.key].at(request.chunk)
    return values[request.box.slices_in(Box(request.chunk, tuple(values.shape)))]


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor; what has one element is contiguous with whatever stride it has."""
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def _aligned(items: Sequence[Item]) -> int:
    return -(-sum(item.num_bytes for item in items) // _ALIGNMENT) * _ALIGNMENT


def _places(items: Sequence[Item], part: torch.Tensor) -> Iterator[tuple[Item, torch.Tensor]]:
    """Each item's bytes in a message."""
    start = 0
    for item in items:
        yield item, part.narrow(0, start, item.num_bytes)
        start += item.num_bytes
