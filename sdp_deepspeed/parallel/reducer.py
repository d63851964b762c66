"""Gradients: accumulation, and their average over the holders of each bucket.

At stage 1 backward passes only move gradients to buckets (`_accumulate`), and `finish_step` reduces all buckets; with
overlap, the pass of the last micro-step reduces those that are complete, and at its end the rest. At stage 2 every pass
does; gradients stay in `.grad` until their bucket is packed (`_pack`). Gradients that are missing (experts without
tokens, skipped branches) are zeros.

Hooks on accumulated gradients detect when a bucket is complete. Buckets are reduced in the order of collectives
(optimizer.py); one that is complete early waits for its turn. When that is may differ between ranks, since only the
order matters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from sdp_deepspeed.parallel.buckets import Bucket, HeldTensor, sent_together
from sdp_deepspeed.parallel.collectives import reduce, reduce_scatter
from sdp_deepspeed.parallel.step_options import StepOptions

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask


class _State(Enum):
    """Where the gradient of a tensor is that was moved to buckets."""

    BUCKETS = "in buckets; `.grad` is None"
    GRAD_IS_VIEW = "`.grad` is a view of the bucket"
    GRAD_WAS_DROPPED = "`.grad` is a view; the caller had set an earlier one to None, which no longer counts"


class Reducer:
    """Accumulates gradients, reduce-scatters them over the holders, and stores the average of this rank's shard in
    `average` of each bucket.

    Args:
        parameters: all trained tensors by name; the names are the same on all ranks.
        tensors: those of which this rank holds slices, by name.
        buckets: those that this rank holds, in the order of collectives.

    Attributes:
        is_last_micro_step: whether the backward pass that runs, or ran last, is the last before the step. Set by the
            engine.
        is_averaged: whether gradients of this step have been averaged, so that only all ranks together can drop them.
            Equal on all ranks.
        is_coalescing: whether backward passes only accumulate gradients, also at stage 2. Set by DeepSpeed's engine.
    """

    def __init__(
        self,
        mask: Mask,
        parameters: Mapping[str, nn.Parameter],
        tensors: Mapping[str, HeldTensor],
        buckets: Sequence[Bucket],
        options: StepOptions,
    ) -> None:
        self.is_last_micro_step = self.is_averaged = self.is_coalescing = False
        self._options = options
        self._mask, self._parameters, self._tensors, self._buckets = mask, parameters, tensors, buckets
        self._device = next(iter(parameters.values())).device
        self._stream = torch.cuda.Stream(self._device) if options.overlap and self._device.type == "cuda" else None
        self._is_offloaded = self._device.type == "cuda" and any(bucket.offloaded is not None for bucket in buckets)
        self._next = 0  # index of the first bucket that has not been reduced
        self._num_missing = [len(bucket.layout.names) for bucket in buckets]  # tensors without a gradient in this pass
        self._pass = 0  # number of backward passes
        self._last_pass = dict[str, int]()  # with a gradient of a tensor, of those with one since the last step
        self._states: dict[str, _State] = {}  # of gradients that are in buckets
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
        averages = self._averages_in_backward
        if averages and self._last_pass.get(name) == self._pass:
            raise RuntimeError(
                f"{name!r} received two gradients in one backward pass; set use_reentrant=False for activation "
                "checkpointing, or use ZeRO stage 1 without overlap_comm"
            )
        self._last_pass[name] = self._pass
        if tensor.bucket_indices[0] < self._next:
            raise RuntimeError(
                f"{name!r} received a gradient after its bucket was reduced; call step() or engine.zero_grad() before "
                "the next backward pass"
            )
        if self._options.stage < 2 or self.is_coalescing:
            self._accumulate(name, tensor)
        if averages:
            for index in tensor.bucket_indices:
                self._num_missing[index] -= 1
            while self._next < len(self._buckets) and not self._num_missing[self._next]:
                self._reduce(self._next + 1)

    @property
    def _averages_in_backward(self) -> bool:
        """Whether the backward pass that runs averages gradients."""
        in_this_pass = self._options.stage == 2 or (self._options.overlap and self.is_last_micro_step)
        return in_this_pass and not self.is_coalescing

    def _accumulate(self, name: str, tensor: HeldTensor) -> None:
        """Move a gradient to its buckets, or add it to their contents. If the gradient of a whole tensor has the
        bucket's dtype, `.grad` becomes a view of the bucket, in which autograd accumulates further gradients."""
        for index in tensor.bucket_indices:
            self._buckets[index].gradients.allocate()
        targets = self._views(tensor)
        parameter = tensor.parameter
        gradient = parameter.grad
        assert gradient is not None
        if tensor.dim is None and targets[0].dtype == gradient.dtype:
            if targets[0].data_ptr() != gradient.data_ptr():
                is_new = name not in self._states or gradient.requires_grad  # create_graph adds out of place
                self._states[name] = self._states.get(name, _State.GRAD_IS_VIEW) if is_new else _State.GRAD_WAS_DROPPED
                targets[0].copy_(gradient)
                parameter.grad = targets[0]
            return
        if name in self._states:
            torch._foreach_add_(targets, list(tensor.slices(gradient)))
        else:
            torch._foreach_copy_(targets, list(tensor.slices(gradient)))
            self._states[name] = _State.BUCKETS
        parameter.grad = None

    def _views(self, tensor: HeldTensor) -> list[torch.Tensor]:
        """Views of its slices in the gradients of its buckets."""
        return [self._buckets[place.bucket_index].gradients.views[place.index_in_bucket] for place in tensor.places]

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Called by the engine after each backward pass, on every rank. Stage 2 reduces the remaining buckets; stage 1
        does so after the last micro-step with overlap, else in `finish_step`."""
        self._pass += 1
        if self._averages_in_backward:
            self._reduce(len(self._buckets))
            self.is_averaged = True
            if self._options.stage == 2:
                self._restart()

    def unused(self) -> list[str]:
        """Tensors of this rank without a gradient since the last step."""
        return [name for name in self._tensors if name not in self._last_pass]

    @property
    def is_local(self) -> bool:
        """Whether gradients are those of this rank until a later pass, which is the last of the step."""
        return self.is_coalescing or (self._options.stage < 2 and not self.is_last_micro_step)

    def local_gradient(self, name: str) -> Sequence[torch.Tensor]:
        """What this rank has accumulated of a tensor's gradient, before it is averaged: its held slices, or nothing."""
        tensor = self._tensors.get(name)
        if tensor is not None and self._states.get(name) is _State.BUCKETS:
            return self._views(tensor)
        gradient = None if tensor is None else tensor.parameter.grad
        return () if tensor is None or gradient is None else tensor.slices(gradient)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Reduce the remaining buckets after the last micro-step, and wait for the averages. Collective."""
        if self._options.stage < 2:
            self._refuse_dropped()
            self._reduce(len(self._buckets))
        elif not self.is_averaged:  # a step without a backward pass
            self.finish_backward()
        self.is_averaged = True
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._is_offloaded:
            torch.cuda.current_stream(self._device).synchronize()  # the CPU reads gradients next

    def _refuse_dropped(self) -> None:
        """Raise RuntimeError if every `.grad` was set to None since the last step, other than by `zero_grad`: those
        of cut tensors were moved to buckets before, and would still count."""
        views = [name for name, state in self._states.items() if state is not _State.BUCKETS]
        are_dropped = all(
            self._states[name] is _State.GRAD_WAS_DROPPED or self._parameters[name].grad is None for name in views
        )
        if views and are_dropped and len(views) < len(self._states):
            raise RuntimeError(
                "every .grad was set to None, but other gradients are in buckets; to drop all, call engine.zero_grad()"
            )

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Drop the gradients of this step. If `is_averaged`, all ranks must call it."""
        if self._stream is not None:  # its reductions may still use the gradients
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._last_pass.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self._buckets:
            bucket.drop_average()
            bucket.gradients.drop()
        self.is_averaged = self.is_last_micro_step = False
        self._restart()

    def _restart(self) -> None:
        self._next = 0
        self._num_missing = [len(bucket.layout.names) for bucket in self._buckets]
        self._states.clear()

    def has_gradients(self) -> bool:
        """Whether there are gradients of an unfinished step."""
        if _State.BUCKETS in self._states.values() or any(bucket.average is not None for bucket in self._buckets):
            return True
        return any(parameter.grad is not None for parameter in self._parameters.values())

    # ---- reduction --------------------------------------------------------------------------------------------------

    def _reduce(self, end: int) -> None:
        """Average the gradients of the buckets from `_next` to `end` over the holders (their sum, divided by their
        number), and set `_next` to `end`."""
        views: dict[str, Sequence[torch.Tensor]] = {}
        for together in sent_together(self._buckets[self._next : end], self._options.bucket_size):
            with self._on_side_stream():
                for bucket in together:
                    self._pack(bucket, views)
                groups = [bucket.group for bucket in together]
                flats = self._to_wire(together)
                averages = [self._memory_of_average(bucket) for bucket in together]  # maybe parts of `flats`
                stepping_position = together[0].layout.stepping_position
                if stepping_position is not None:
                    reduce(averages[0], flats[0], groups[0], stepping_position)
                else:
                    reduce_scatter(averages, flats, groups)
                for bucket, flat, average in zip(together, flats, averages, strict=True):
                    if flat.dtype != torch.float16:  # fp16 was divided before
                        average.div_(bucket.group.size)
                    bucket.add_average(average)
                    if self._options.stage == 2:
                        if self._stream is not None:
                            bucket.gradients.flat.record_stream(self._stream)  # allocated on another one if coalesced
                        bucket.gradients.drop()
            self._next += len(together)

    def _pack(self, bucket: Bucket, views: dict[str, Sequence[torch.Tensor]]) -> None:
        """Fill the slices that have no gradient yet, with zeros for missing gradients. Stage 2 frees `.grad` in the
        last bucket of each tensor."""
        bucket.gradients.allocate()[bucket.layout.num_elements :].zero_()
        gradients: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []
        for place, target in zip(bucket.places, bucket.gradients.views, strict=True):
            name = place.name
            if self._states.get(name) is _State.BUCKETS:
                continue
            gradient = self._parameters[name].grad
            if gradient is None:
                empty.append(target)
                continue
            if name not in views:
                views[name] = self._tensors[name].slices(gradient)
            source = views[name][place.index_in_tensor]
            if bucket.layout.is_cut or source.data_ptr() != target.data_ptr():
                if self._stream is not None:
                    gradient.record_stream(self._stream)
                gradients.append(source)
                targets.append(target)
        if targets:
            torch._foreach_copy_(targets, gradients)
        if empty:
            torch._foreach_zero_(empty)
        if self._options.stage == 2:
            for name in bucket.layout.names:
                if self._buckets[self._tensors[name].bucket_indices[-1]] is bucket:
                    self._parameters[name].grad = None

    def _to_wire(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Flat gradients in the communication dtype; in fp16 divided by the number of holders, since the sum may
        overflow although the mean does not."""
        flats = [bucket.gradients.flat for bucket in buckets]
        dtype = self._options.wire_dtype or flats[0].dtype
        if dtype != flats[0].dtype:
            sizes = [flat.numel() for flat in flats]
            buffers = torch.empty(sum(sizes), dtype=dtype, device=self._device).split(sizes)
            flats = [buffer.copy_(flat) for buffer, flat in zip(buffers, flats, strict=True)]
        if dtype == torch.float16:
            for bucket, flat in zip(buckets, flats, strict=True):
                flat.div_(bucket.group.size)
        return flats

    def _memory_of_average(self, bucket: Bucket) -> torch.Tensor:
        """Memory for the average of this rank's shard: that of its gradients, unless these are dropped earlier or
        have another dtype."""
        shard = bucket.shard_of(bucket.gradients.flat)
        is_kept = self._options.stage < 2 and shard.dtype == bucket.step_dtype
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
