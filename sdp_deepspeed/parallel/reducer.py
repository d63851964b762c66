"""Gradients: accumulation, and their average over the holders of each bucket, during backward or in the step.

Hooks on accumulated gradients detect when a bucket is complete. Buckets are reduced in the order of collectives
(optimizer.py); one that is complete early waits for its turn. At the end of a backward pass the remaining buckets are
reduced, with zeros for missing gradients (experts without tokens, skipped branches).

The time at which a bucket is reduced may differ between ranks, since only the order matters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from sdp_deepspeed.parallel.buckets import Bucket, HeldTensor, coalesced
from sdp_deepspeed.parallel.groups import reduce, reduce_scatter


class Reducer:
    """Accumulates gradients, reduce-scatters them over the holders, and stores the average of this rank's shard in
    `average` of each bucket.

    Args:
        mask: this rank's subnetwork.
        names: names of all trained tensors, the same on all ranks.
        tensors: those of which this rank holds slices, by name.
        buckets: those that this rank holds, in the order of collectives.
        stage: ZeRO stage.
        bucket_size: maximum number of elements that arrive at once.
        overlap: whether stage 1 reduces complete buckets during backward, as stage 2 always does, and on a GPU
            on a separate stream.
        gradient_dtype: dtype in which gradients of micro-steps are accumulated. Default: that of the weights.
        wire_dtype: communication dtype. Default: the accumulation dtype.

    Attributes:
        is_last_micro_step: whether the next backward pass is the last before the step. Set by the engine.
        overlap: the argument.
    """

    def __init__(
        self,
        mask: Any,
        names: Iterable[str],
        tensors: Mapping[str, HeldTensor],
        buckets: Sequence[Bucket],
        *,
        stage: Literal[1, 2],
        bucket_size: int,
        overlap: bool = False,
        gradient_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.is_last_micro_step = True
        self._mask, self._parameters = mask, {name: mask.parameters[name] for name in names}
        self._tensors, self._buckets = tensors, buckets
        self._stage, self._bucket_size, self.overlap = stage, bucket_size, overlap
        self._gradient_dtype, self._wire_dtype = gradient_dtype, wire_dtype
        self._device = next(iter(self._parameters.values())).device
        self._stream = torch.cuda.Stream(self._device) if overlap and self._device.type == "cuda" else None
        self._next = 0  # index of the first bucket that has not been reduced
        self._seen: set[str] = set()  # tensors with a gradient in this pass
        self._in_slots: set[str] = set()  # whole tensors whose `.grad` is their slot
        self._dropped: set[str] = set()  # those of `_in_slots` whose `.grad` was removed since
        self._num_reduced_passes = 0  # backward passes of this step at whose end all buckets were reduced
        self._hooks = [
            tensor.parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
            for name, tensor in tensors.items()
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- backward ---------------------------------------------------------------------------------------------------

    @torch.no_grad()  # also with create_graph=True
    def _on_gradient(self, name: str) -> None:
        """Hook: a gradient has been accumulated in a tensor's `.grad`."""
        if not self._mask.is_applied:
            raise RuntimeError(
                "a backward pass inside engine.dense(): use torch.autograd.grad, or leave the context first"
            )
        tensor = self._tensors[name]
        reduces_early = self._stage == 2 or (self.overlap and self.is_last_micro_step)
        if reduces_early and name in self._seen:
            raise RuntimeError(
                f"{name!r} received two gradients in one backward pass; set use_reentrant=False for activation "
                "checkpointing, or use ZeRO stage 1 without overlap_comm"
            )
        self._seen.add(name)
        if tensor.buckets[0] < self._next:
            raise RuntimeError(
                f"{name!r} received a gradient after its bucket was reduced; call step() or engine.zero_grad() before "
                "the next backward pass"
            )
        if self._stage < 2:
            self._accumulate(name, tensor)
        if reduces_early:
            for index in tensor.buckets:
                self._buckets[index].waits_for.discard(name)
            while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
                self._reduce([self._buckets[self._next]])

    def _accumulate(self, name: str, tensor: HeldTensor) -> None:
        """Move a gradient to its slots, or add it to their contents. If the gradient of a whole tensor has the slot's
        dtype, `.grad` becomes a view of the slot, in which autograd accumulates further gradients."""
        parameter = tensor.parameter
        for index in tensor.buckets:
            self._buckets[index].place_gradients(self._gradient_dtype)
        places = [(self._buckets[index], number) for index, number in tensor.slots]
        slots = [bucket.gradient_slots[number] for bucket, number in places]
        first, number = places[0]
        assert parameter.grad is not None
        if first.layout.is_whole and slots[0].dtype == parameter.grad.dtype:
            if slots[0].data_ptr() != parameter.grad.data_ptr():
                if name in self._in_slots and not parameter.grad.requires_grad:  # create_graph adds out of place
                    self._dropped.add(name)
                self._in_slots.add(name)
                slots[0].copy_(parameter.grad)
                parameter.grad = slots[0]
            return
        gradients = tensor.slices(parameter.grad)
        if first.filled[number]:
            torch._foreach_add_(slots, list(gradients))
        else:
            torch._foreach_copy_(slots, list(gradients))
            for bucket, number in places:
                bucket.filled[number] = True
        parameter.grad = None

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Called by the engine after each backward pass, on every rank. Stage 2 reduces the remaining buckets; stage 1
        does so after the last micro-step with overlap, else in `finish`."""
        self._seen.clear()
        if self._stage == 2:
            self._reduce(self._buckets[self._next :])
            self._num_reduced_passes += 1
            self._restart()
        elif self.overlap and self.is_last_micro_step:
            self._reduce(self._buckets[self._next :])
            self._num_reduced_passes += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the remaining buckets after the last micro-step, and wait for the averages. Collective."""
        if self._stage < 2:
            self._refuse_dropped()
            self._reduce(self._buckets[self._next :])
        elif not self._num_reduced_passes:
            self.finish_backward()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._device.type == "cuda" and any(bucket.offloaded is not None for bucket in self._buckets):
            torch.cuda.current_stream(self._device).synchronize()  # the CPU reads gradients next

    def _refuse_dropped(self) -> None:
        """Raise RuntimeError if every `.grad` was set to None since the last step, other than by a `zero_grad`: those
        of cut tensors were moved to buckets before, and would still count."""
        dropped = self._dropped | {name for name in self._in_slots if self._parameters[name].grad is None}
        if dropped and dropped == self._in_slots and any(any(bucket.filled) for bucket in self._buckets):
            raise RuntimeError(
                "every .grad was set to None, but other gradients are in buckets; to drop all, call engine.zero_grad()"
            )

    @property
    def is_averaged(self) -> bool:
        """Whether gradients of this step have been averaged, so that only all ranks together can drop them. Equal on
        all ranks."""
        return self._num_reduced_passes > 0

    @torch.no_grad()
    def zero_grad(self, names: Collection[str] | None = None) -> None:
        """Drop the gradients of this step. If `is_averaged`, all ranks must call it.

        Args:
            names: of trained tensors. Default: all.
        """
        if self._stream is not None:  # its reductions may still use the gradients
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if names is not None and len(names) < len(self._parameters):
            self._drop(names)
            return
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self._buckets:
            bucket.average = None
            bucket.set_gradients(None)
            bucket.drop_gradients()
        self._num_reduced_passes = 0
        self._restart()

    def _drop(self, names: Collection[str]) -> None:
        """Drop the gradients of some tensors; buckets that were reduced stay reduced."""
        if self._device.type == "cuda" and any(bucket.offloaded is not None for bucket in self._buckets):
            torch.cuda.current_stream(self._device).synchronize()  # averages are on their way to host memory
        self._in_slots.difference_update(names)
        self._dropped.difference_update(names)
        for name in names:
            self._parameters[name].grad = None
        for bucket in self._buckets:
            dropped = [name in names for name, _ in bucket.places]
            bucket.filled = [was and not now for was, now in zip(bucket.filled, dropped, strict=True)]
            bucket.zero_average(names)

    def _restart(self) -> None:
        self._next = 0
        for names in (self._seen, self._in_slots, self._dropped):
            names.clear()
        for bucket in self._buckets:
            bucket.waits_for.update(bucket.names)
            bucket.filled = [False] * len(bucket.filled)

    def has_gradients(self) -> bool:
        """Whether there are gradients of an unfinished step."""
        return any(bucket.average is not None or any(bucket.filled) for bucket in self._buckets) or any(
            parameter.grad is not None for parameter in self._parameters.values()
        )

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Tensors of gradients besides `.grad`: averages and accumulation buffers."""
        found = [tensor for bucket in self._buckets for tensor in (bucket.average, bucket.gradients)]
        return [tensor for tensor in found if tensor is not None]

    # ---- reduction --------------------------------------------------------------------------------------------------

    def _reduce(self, buckets: Sequence[Bucket]) -> None:
        """Average gradients over the holders: their sum, divided by their number.

        Args:
            buckets: the next ones.
        """
        views: dict[str, Sequence[torch.Tensor]] = {}
        for together in coalesced(buckets, self._bucket_size):
            with self._on_side_stream():
                for bucket in together:
                    self._pack(bucket, views)
                first, groups, flats = together[0], [b.holder_group for b in together], self._to_wire(together)
                averages = [self._own_shard(bucket) for bucket in together]
                if first.layout.owner is not None:
                    reduce(averages[0], flats[0], groups[0], first.layout.owner)
                else:
                    reduce_scatter(averages, flats, groups)
                for bucket, flat, average in zip(together, flats, averages, strict=True):
                    if flat.dtype != torch.float16:
                        average.div_(bucket.holder_group.size)
                    bucket.add_average(average)
                    if self._stage == 2:
                        bucket.drop_gradients()
            self._next += len(together)

    def _pack(self, bucket: Bucket, views: dict[str, Sequence[torch.Tensor]]) -> None:
        """Fill the slots that have no gradient yet, with zeros for missing gradients. Stage 2 frees `.grad` in the last
        bucket of each tensor.

        Args:
            views: cached views of gradients.
        """
        bucket.place_gradients(self._gradient_dtype)
        sources, targets, empty = [], [], []
        for (name, place), slot, is_filled in zip(bucket.places, bucket.gradient_slots, bucket.filled, strict=True):
            gradient = self._parameters[name].grad
            if is_filled:
                continue
            if gradient is None:
                empty.append(slot)
                continue
            if name not in views:
                views[name] = self._tensors[name].slices(gradient)
            source = views[name][place]
            if not bucket.layout.is_whole or source.data_ptr() != slot.data_ptr():
                if self._stream is not None:
                    gradient.record_stream(self._stream)
                sources.append(source)
                targets.append(slot)
        if sources:
            torch._foreach_copy_(targets, sources)
        if empty:
            torch._foreach_zero_(empty)
        assert bucket.gradients is not None
        bucket.gradients[bucket.layout.num_elements :].zero_()
        if self._stage == 2:
            for name in bucket.names:
                if self._buckets[self._tensors[name].buckets[-1]] is bucket:
                    self._parameters[name].grad = None

    def _to_wire(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Flat gradients in the communication dtype; in fp16 divided by the number of holders, since the sum may
        overflow although the mean does not."""
        flats = [bucket.gradients for bucket in buckets if bucket.gradients is not None]
        dtype = self._wire_dtype or flats[0].dtype
        if dtype != flats[0].dtype:
            sizes = [flat.numel() for flat in flats]
            buffers = torch.empty(sum(sizes), dtype=dtype, device=self._device).split(sizes)
            flats = [buffer.copy_(flat) for buffer, flat in zip(buffers, flats, strict=True)]
        if dtype == torch.float16:
            for bucket, flat in zip(buckets, flats, strict=True):
                flat.div_(bucket.holder_group.size)
        return flats

    def _own_shard(self, bucket: Bucket) -> torch.Tensor:
        """Memory for the average of this rank's shard: that of its gradients, unless they are dropped earlier."""
        assert bucket.gradients is not None
        shard = bucket.shard_of(bucket.gradients)
        is_kept = self._stage < 2 and shard.dtype == bucket.step_dtype
        return shard if is_kept else torch.empty_like(shard, dtype=bucket.step_dtype)

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Context on the side stream, after the work that is queued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
