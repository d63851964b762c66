"""Stages 0 and 1: gradients are averaged in the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sdp_deepspeed.exchange.averaging import Averages, Averaging, AveragingOptions, Pipeline
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import num_elements


class StepAveraging(Averaging):
    """Everything is exchanged in `collect`. Any number of backward passes may come before it.

    Args:
        keeps_flats: stage 1. At stage 0 the owners send averages back to all holders.
        needs_one_flat: for each optimizer param group whether its averages must be one tensor (a master's gradient).
            Others grow bucket by bucket while local gradients go, so that never both are there as a whole.
    """

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        options: AveragingOptions,
        *,
        keeps_flats: bool = True,
        needs_one_flat: Sequence[bool] = (),
    ) -> None:
        super().__init__(exchange, gradients, options)
        self._max_in_flight = options.max_in_flight
        self._keeps_flats = keeps_flats
        self._needs_one_flat = list(needs_one_flat) or [True] * len(options.group_sizes)

    @torch.no_grad()
    def collect(self) -> Averages:
        squares = [self._no_squares()] * len(self._exchange.buckets)  # each in its place, whichever comes first
        flats = [
            [self._flat(size)] if self._keeps_flats and whole else []
            for size, whole in zip(self._group_sizes, self._needs_one_flat, strict=True)
        ]
        position = [0] * len(flats)

        def slots(bucket: Bucket) -> list[torch.Tensor]:
            found = []
            for segment, fragments in self._exchange.owned(bucket):
                group, length = segment.group, num_elements(fragments)
                if self._needs_one_flat[group]:
                    found.append(flats[group][0].narrow(0, position[group], length))
                    position[group] += length
                else:
                    found.append(self._flat(length))
                    flats[group].append(found[-1])
            return found

        def average(bucket: Bucket) -> Steps:
            lent, averages = (None, slots(bucket)) if self._keeps_flats else self._borrowed(bucket)
            yield from self._exchange.reduce(bucket, self._gradients, averages, partial(self._packed, bucket))
            if self._needs_norm:
                squares[bucket.index] = self._squares(bucket, averages)
            if lent is not None:
                yield from self._send_back(bucket, averages)
                self._exchange.buffers.give(lent)

        pipeline = Pipeline(self._max_in_flight, self._exchange.buffers.streams)
        for bucket in self._exchange.buckets:
            pipeline.add(average(bucket))
        pipeline.join()
        total = self._summed(torch.stack(squares).sum())[0] if self._needs_norm else None
        return Averages(flats if self._keeps_flats else None, total)

    def _flat(self, num_elements: int) -> torch.Tensor:
        """For averages; whatever the user's default dtype."""
        return torch.empty(num_elements, dtype=torch.float32, device=self._device)

    def _packed(self, bucket: Bucket) -> None:
        if self._keeps_flats:  # else averages come back into them
            self._free_packed(bucket)

    def _send_back(self, bucket: Bucket, averages: Sequence[torch.Tensor]) -> Steps:
        for name in self._exchange.held_names(bucket):
            self._gradients.make(name)
        self._exchange.keep(bucket, averages, self._gradients)
        yield from self._exchange.distribute(bucket, self._gradients)
