"""What ranks ask one another for: each gets the requests that it must serve, and no others.

Of all requests of all ranks there are a million where 64 ranks re-plan a model of 7B neurons, and each rank serves or
makes some ten thousand of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sdp_deepspeed.checkpoint.state.boxes import Box, Sizes
from sdp_deepspeed.distributed.communicator import Communicator

IntArray = npt.NDArray[np.int64]


class Request(NamedTuple):
    """A box that a rank asks another one for.

    Args:
        key: of the dense tensor.
        chunk: where the chunk begins that has the box, at its owner.
        box: the box.
    """

    key: str
    chunk: Sizes
    box: Box


class Questions:
    """Numbers and requests of all ranks, by all-to-alls; every rank of the group makes one and calls the same methods.

    Args:
        dp_group: the data-parallel group.
        device: of what travels.
        keys: of all dense tensors, the same on every rank in the same order.

    Attributes:
        sent_bytes: by this rank.
    """

    def __init__(self, dp_group: Communicator, *, device: torch.device, keys: Sequence[str]) -> None:
        self._dp_group = dp_group
        self._device = device
        self._keys = list(keys)
        self._numbers = {key: number for number, key in enumerate(keys)}
        self.sent_bytes = 0

    def exchange(self, requests: Mapping[int, Sequence[Request]]) -> list[list[Request]]:
        """Give each rank what this one asks it for.

        Returns:
            By rank what that one asks this one for, in its order.
        """
        ranks = range(self._dp_group.size)
        messages = [self._packed(requests[rank]) if requests.get(rank) else b"" for rank in ranks]
        sent_splits = list(map(len, messages))
        received_splits = self.numbers(sent_splits)
        sent = torch.frombuffer(bytearray(b"".join(messages) + b"\0"), dtype=torch.uint8)[:-1]  # never of nothing
        received = torch.empty(sum(received_splits), dtype=torch.uint8, device=self._device)
        self._send(received, sent.to(self._device), received_splits, sent_splits)
        return [self._unpacked(part.cpu().numpy().tobytes()) for part in received.split(received_splits)]

    def numbers(self, numbers: Sequence[int]) -> list[int]:
        """Give each rank a number of its own.

        Returns:
            What each rank gives this one.
        """
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        received, splits = sent.clone(), [1] * len(numbers)
        self._send(received, sent, splits, splits)
        return received.tolist()

    def _send(
        self, received: torch.Tensor, sent: torch.Tensor, received_splits: Sequence[int], sent_splits: Sequence[int]
    ) -> None:
        self._dp_group.all_to_all(received, sent, received_splits, sent_splits).wait()
        self.sent_bytes += (sum(sent_splits) - sent_splits[self._dp_group.rank]) * sent.element_size()

    def _packed(self, requests: Sequence[Request]) -> bytes:
        """As numbers; those of a key that follow one another are the rows of a table."""
        tables = []
        for key, of_key in groupby(requests, key=lambda request: request.key):
            rows = [(*chunk, *box.offsets, *box.sizes) for _, chunk, box in of_key]
            tables.append((self._numbers[key], small(np.array(rows, np.int64))))
        return pickle.dumps(tables)

    def _unpacked(self, message: bytes) -> list[Request]:
        tables = pickle.loads(message) if message else ()
        return [_request(self._keys[number], row) for number, table in tables for row in table.tolist()]


def small(numbers: IntArray) -> npt.NDArray[Any]:
    """The same numbers in the smallest type that has them all, which is two bytes for most models' sizes."""
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)))


def _request(key: str, row: Sequence[int]) -> Request:
    dims = len(row) // 3
    return Request(key, tuple(row[:dims]), Box(tuple(row[dims : 2 * dims]), tuple(row[2 * dims :])))
