"""ZeRO stage 2: gradients leave during backward, bucket by bucket; only owned shards are kept.

A round sends every bucket once, in the order of the buckets, which is the same on all ranks; each backward pass of the
engine is a round. A bucket leaves as soon as all its gradients are there and all buckets before it have left. What
comes too late for its bucket stays in `param.grad` for the next round, since averages add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.exchange.averaging import Averages, Averaging, AveragingOptions, Pipeline
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.cuts import one_after_the_other
from sdp_deepspeed.layout.fragments import Fragment, Transfer, num_elements
from sdp_deepspeed.messages import listed


class BackwardAveraging(Averaging):
    """Every data-parallel rank runs the same number of rounds.

    Args:
        parameters: the module's parameters by dense name.
        dtype: in which owned averages are summed over the micro-steps.
    """

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        options: AveragingOptions,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(exchange, gradients, options)
        self._parameters = parameters
        self._dtype = dtype
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._expected = [exchange.held_names(bucket) & trained for bucket in exchange.buckets]
        self._buckets_of: dict[str, list[int]] = {}
        for index, names in enumerate(self._expected):
            for name in names:
                self._buckets_of.setdefault(name, []).append(index)
        self._split = [self._split_in(bucket) for bucket in exchange.buckets]
        self._flats: list[torch.Tensor] | None = None
        self._sums: list[list[torch.Tensor]] = []  # per bucket, stretches of the flats
        self._pipeline = Pipeline(options.max_in_flight, exchange.buffers.streams)
        self._next = 0  # first bucket that has not left in this round
        self._failed = False  # the pass of this round ended with an error
        self._num_rounds = 0  # since averages were last taken or dropped
        self._ready: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._late: set[str] = set()  # got a second gradient when a part of the first had left

    def install(self) -> None:
        for name in self._buckets_of:
            parameter = self._parameters[name]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name)))

    def uninstall(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, name: str) -> None:
        """A parameter's gradient is complete, or so it seems: another checkpointed segment may use it too."""
        self._exchange.buffers.streams.note()
        buckets = self._buckets_of[name]
        if name in self._ready and buckets[0] < self._next <= buckets[-1]:
            self._late.add(name)  # a part of it has left
        self._ready.add(name)
        while self._next < len(self._expected) and self._ready >= self._expected[self._next]:
            self._send(self._exchange.buckets[self._next])

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        self._pipeline.add(self._average(bucket))

    def _average(self, bucket: Bucket) -> Steps:
        lent, averages = self._borrowed(bucket)
        yield from self._exchange.reduce(bucket, self._gradients, averages, partial(self._free_packed, bucket))
        self._make_sums()
        if averages:
            torch._foreach_add_(self._sums[bucket.index], averages)
        self._exchange.buffers.give(lent)

    def _free_packed(self, bucket: Bucket) -> None:
        """As `Averaging`, but what came late stays; of what cannot be freed, the part that has left becomes zero, so
        that a late gradient is all that the next round finds there."""
        for name in self._last_use[bucket.index]:
            if name not in self._late:
                self._gradients.free(name)
        left = [f for f in self._split[bucket.index] if self._gradients.exists(f.piece.parameter)]
        if not left:
            return
        zero = torch.zeros(1, dtype=torch.float32, device=self._device)
        transfer = Transfer(left, one_after_the_other(fragment.num_elements for fragment in left))
        transfer.scatter([zero.expand(num_elements(left))], self._gradients)

    def _split_in(self, bucket: Bucket) -> list[Fragment]:
        """What this rank holds of the bucket, of parameters that several buckets have parts of."""
        return [f for f in self._exchange.held(bucket) if len(self._buckets_of.get(f.piece.parameter, ())) > 1]

    def begin_backward(self) -> None:
        """A pass that failed was a round too: others may wait for what it had not sent."""
        if self._failed:
            self.end_backward()

    def fail_backward(self) -> None:
        self._failed = True  # an exception passes through: this is no time to wait for others

    @torch.no_grad()
    def end_backward(self) -> None:
        """Send what has not left; the caller's stream need not wait for it."""
        while self._next < len(self._exchange.buckets):
            self._send(self._exchange.buckets[self._next])
        self._pipeline.finish()
        self._next = 0
        self._failed = False
        self._num_rounds += 1
        self._ready.clear()
        self._late.clear()

    @torch.no_grad()
    def collect(self) -> Averages:
        self.begin_backward()
        squares, is_left = self._look()
        while is_left:
            self.end_backward()
            squares, is_left = self._look()
        flats = self._make_sums()
        self.drop()
        flats.reverse()
        averages = [[flats.pop().float()] for _ in range(len(flats))]  # no two copies of all of them
        return Averages(averages, squares if self._needs_norm else None)

    def _make_sums(self) -> list[torch.Tensor]:
        """All flats; zeros where there are none yet."""
        if self._flats is None:
            self._flats = [torch.zeros(size, dtype=self._dtype, device=self._device) for size in self._group_sizes]
            self._sums = self._slots(self._flats)
        return self._flats

    def _slots(self, flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each bucket the stretches of `flats` for what this rank owns of it."""
        position = [0] * len(flats)
        slots: list[list[torch.Tensor]] = []
        for bucket in self._exchange.buckets:
            slots.append([])
            for segment, fragments in self._exchange.owned(bucket):
                length = num_elements(fragments)
                slots[-1].append(flats[segment.group].narrow(0, position[segment.group], length))
                position[segment.group] += length
        return slots

    def _look(self) -> tuple[float, bool]:
        """The sum of squares, and whether any rank has gradients of a pass that nobody ended, or that came too late for
        their bucket; together, since each costs the host a wait.

        Raises:
            RuntimeError: on all ranks, naming those that ended another number of passes.
        """
        self._pipeline.join()
        self._make_sums()
        squares = [self._no_squares()] * len(self._exchange.buckets)
        for bucket in self._exchange.buckets if self._needs_norm else ():
            squares[bucket.index] = self._squares(bucket, self._sums[bucket.index])
        is_left = self._next > 0 or any(map(self._gradients.exists, self._buckets_of))
        facts = self._num_rounds, self._num_rounds**2
        total, any_left, (rounds, rounds_2) = self._summed(torch.stack(squares).sum(), is_left, *facts)
        if rounds * rounds != self._dp_group.size * rounds_2:  # equal only if all numbers are
            raise RuntimeError(self._explain_rounds())
        return total, any_left

    def _explain_rounds(self) -> str:
        counts = self._dp_group.gather_objects(self._num_rounds)
        fewer = [f"rank {rank} {count}" for rank, count in enumerate(counts) if count < max(counts)]
        return (
            f"since the last step, or since their gradients were dropped, ranks ended {max(counts)} backward passes, "
            f"but {listed(fewer)}. At stage 2 averages are spread over all ranks: all must call zero_grad where one "
            "does"
        )

    def tensors(self) -> list[torch.Tensor]:
        return list(self._flats or ())

    def drop(self) -> None:
        """All data-parallel ranks call it after the same pass; it ends one that failed."""
        if self._failed or self._next:
            self.end_backward()
        self._pipeline.join()
        self._flats, self._sums = None, []
        self._num_rounds = 0
