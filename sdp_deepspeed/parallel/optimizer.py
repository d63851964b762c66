"""The optimizer, sharded over the holders of each slice (ZeRO stages 0, 1 and 2).

A step, for every bucket that this rank holds:

1. Gradients are averaged over the holders. Stage 0: an all-reduce, and every holder has the average. Stages 1 and 2: a
   reduce-scatter, and each holder has the average of the shard that it owns. Stages 0 and 1 do this after the last
   micro-step; stage 2 does it in every backward pass, where owners accumulate their shards and local gradients are
   freed.
2. The norm of the whole gradient is computed (norm.py). Gradients are clipped, or the step is skipped.
3. The optimizer steps fp32 shards. If it updates whole tensors (Muon), it steps the tensors that this rank owns: their
   gradients are reduced to it, and their weights broadcast from it.
4. Weights are returned. Forward regime: an all-gather over the holders. Backward regime: every rank runs the whole
   model, so for each depth range there is one all-gather over all data-parallel ranks.

# Order of collectives

All ranks have the same list of buckets (`plan_buckets`), sorted by (depth at which the last gradient is ready, holders,
param group and dtype). Each rank processes the buckets that it holds in this order, in every phase: averages of a
backward pass, the norm, weights. A bucket that is complete early waits for its turn. Collectives are issued with
`async_op=False` on one stream: the next one starts after the previous one has finished, so two communicators of a rank
never run at once. If ranks exchange shards directly (`groups.exchange`), the messages of a bucket count as one
collective. A rank may post those of consecutive buckets at once, then wait for all.

This cannot deadlock. Give each collective the key (number of the phase, position in the list). Its members agree on the
key, and each rank issues its collectives in ascending order of keys. Suppose that some collective never finishes, and
take the one with the smallest key. All collectives with smaller keys have finished, so none of its members waits in
another one: each is inside it or has posted its messages, or is computing and will. Hence all members arrive, and it
finishes: a contradiction. Collectives of the host between tensor-parallel ranks do not change this: these ranks hold
the same buckets, so all of them insert such a collective at the same position.

The time at which a bucket is reduced may differ between ranks. If a tensor gets several gradients in one backward pass,
its bucket is reduced at the end of the pass, on the ranks where that happened. The first pass detects such tensors. In
stages 0 and 1 it reduces nothing early. Stage 2 cannot wait, so after the first pass all ranks agree on buckets that
are reduced again.

The list depends on facts that all ranks share, never on which gradients exist. At the end of a backward pass the
remaining buckets are reduced in order, with zeros for missing gradients (experts without tokens, skipped branches).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from sdp_deepspeed.parallel.backward_returns import plan_returns
from sdp_deepspeed.parallel.buckets import BUCKET_SIZE, Bucket, ShardPart, plan_buckets
from sdp_deepspeed.parallel.groups import Groups, all_gather, broadcast, received_elements, reduce, reduce_scatter
from sdp_deepspeed.parallel.norm import gradient_norm, scale_gradients
from sdp_deepspeed.parallel.offload import Moved, move_back, move_to_host
from sdp_deepspeed.parallel.optimizer_kinds import groups_of_whole_tensors
from sdp_deepspeed.parallel.param_groups import prefer_fused, replace_parameters
from sdp_deepspeed.units import Piece


class ShardedOptimizer:
    """Steps an optimizer on the shards or whole tensors that this rank owns. Every rank constructs it, with equal
    options.

    Args:
        optimizer: over the dense model's parameters, not stepped yet. Parameters in its param groups are replaced by
            this rank's shards; other options are unchanged.
        mask: this rank's subnetwork. Its `parameters` (by dense name), `pieces` (of each tensor, with their holders, in
            forward order), `shapes` (of dense tensors), `is_applied` and `view(piece)` are used.
        groups: process groups of all holder sets.
        param_groups: param group index of each trained tensor, by dense name. The same on all ranks: without parameters
            that the user froze, with those that only the mask froze here.
        regime: "forward" returns weights to the holders, "backward" to all ranks.
        stage: ZeRO stage.
        clip: maximum gradient norm; 0 does not clip.
        bucket_size: see `plan_buckets`.
        overlap: whether stages 0 and 1 reduce complete buckets during backward, as stage 2 always does, and on a GPU
            on a separate stream.
        gradient_dtype: dtype in which gradients of micro-steps are accumulated. Default: that of the weights.
        wire_dtype: communication dtype of gradients. Default: the accumulation dtype.
        replicated: tensors that are equal on all tensor-parallel ranks; the norm counts them once.
        offload: whether shards, gradients and optimizer state are in host memory (CPU offload).
        pin_memory: whether to pin that memory, if weights are on a GPU.

    Attributes:
        is_last_micro_step: whether the next backward pass is the last before `step`. Set by the host.
        norm: of the last step's averaged gradient before clipping; None before the first step.
        held: buckets of which this rank is a holder, in the order of collectives.
        buckets: `held`; in the backward regime all buckets.
        param_groups: the argument.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mask: Any,
        groups: Groups,
        param_groups: Mapping[str, int],
        *,
        regime: Literal["forward", "backward"],
        stage: Literal[0, 1, 2],
        clip: float = 0.0,
        bucket_size: int | None = None,
        overlap: bool = False,
        gradient_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        replicated: Collection[str] = (),
        offload: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.optimizer, self.mask, self.groups = optimizer, mask, groups
        self.regime, self.stage, self.clip, self.overlap = regime, stage, clip, overlap
        self.is_last_micro_step = True
        self.norm: torch.Tensor | None = None
        self._offload, self._pin_memory = offload, pin_memory
        self._gradient_dtype, self._wire_dtype = gradient_dtype, wire_dtype
        self._bucket_size = bucket_size or BUCKET_SIZE
        self.param_groups = dict(param_groups)
        self._parameters = {name: mask.parameters[name] for name in param_groups}
        self._device = next(iter(self._parameters.values())).device
        layouts = plan_buckets(
            {name: found for name, found in mask.pieces.items() if name in param_groups},
            mask.shapes,
            {name: parameter.dtype for name, parameter in self._parameters.items()},
            param_groups,
            bucket_size=bucket_size,
            replicated=replicated,
            stepped_whole=self._stepped_whole(param_groups, replicated),
        )
        buckets = [
            Bucket(layout, groups.of(layout.holders), steps_all=stage == 0, device=self._device) for layout in layouts
        ]
        self.buckets = [b for b in buckets if b.group is not None or regime == "backward"]
        self.held = [b for b in buckets if b.group is not None]
        self._numbers = [
            number for number, bucket in enumerate(buckets) if bucket.group is not None
        ]  # indices of `held` in the list of all ranks
        self._num_buckets = len(buckets)  # in the list of all ranks
        self._next = 0  # index in `held` of the first bucket that has not been reduced
        self._is_first_pass = True  # of backward
        self._seen: set[str] = set()  # tensors with a gradient in this pass
        self._repeated: set[str] = set()  # tensors with several gradients in one pass
        self._num_reduced_passes = 0  # backward passes of this step that stage 2 has reduced
        self._stream = torch.cuda.Stream(self._device) if overlap and self._device.type == "cuda" else None

        slots: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, bucket in enumerate(self.held):
            for number, part in enumerate(bucket.layout.slices):
                slots[part.piece.parameter].append((index, number))
        self._buckets_of = {name: [*dict.fromkeys(index for index, _ in found)] for name, found in slots.items()}
        # cut dimension of each tensor, and lengths of its held slices, which are adjacent
        self._cuts: dict[str, tuple[int | None, list[int]]] = {}
        places: dict[Piece, int] = {}
        for name in slots:
            held = [piece for piece, holders in mask.pieces[name] if groups.rank in holders]
            self._cuts[name] = held[0].dim, [piece.length for piece in held]
            places |= {piece: place for place, piece in enumerate(held)}
        for bucket in self.held:
            bucket.places = [(part.piece.parameter, places[part.piece]) for part in bucket.layout.slices]
        # bucket and slot of each held slice, in the order of the slices
        self._slots_of: dict[str, list[tuple[Bucket, int]]] = {}
        for name, found in slots.items():
            in_order = sorted(found, key=lambda slot: self.held[slot[0]].places[slot[1]][1])
            self._slots_of[name] = [(self.held[index], number) for index, number in in_order]
        self._place_buffers()
        returned = [bucket for bucket in self.buckets if regime == "backward" and not self._all_step(bucket)]
        self._returns = plan_returns(returned, groups.data_parallel.size, groups.rank)
        self._hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(
                lambda parameter, name=name: self._on_gradient(name)
            )
            for name in self._slots_of
        ]
        replace_parameters(
            optimizer,
            [
                [parameter for bucket in self.held if bucket.layout.param_group == i for parameter in bucket.parameters]
                for i in range(len(optimizer.param_groups))
            ],
        )
        self._fused: list[dict[str, Any]] = []  # param groups for which the fused kernel was chosen here
        if stage > 0:  # stage 0 needs bitwise agreement; fused CPU kernels round by position
            self._fused = prefer_fused(optimizer)
        self._num_param_groups = len(optimizer.param_groups)
        self._moved: Moved = []
        self._is_offloaded = False

    def _stepped_whole(self, param_groups: Mapping[str, int], replicated: Collection[str]) -> list[str]:
        """Names of tensors that the optimizer must step as a whole.

        Raises:
            ValueError: the same on all ranks: such a tensor is not a matrix, is cut, or is divided.
        """
        whole_groups = groups_of_whole_tensors(self.optimizer)
        names = [name for name, index in param_groups.items() if index in whole_groups]
        for name in names:
            if len(self.mask.shapes[name]) < 2:  # DeepSpeed's Muon would apply the raw gradient
                why = "is not a matrix; put it into a param group for AdamW (DeepSpeed's Muon: use_muon=False)"
            elif self.mask.pieces[name][0][0].dim is not None:
                why = "is cut into neurons or heads; use block units for it, or an elementwise optimizer"
            elif self.groups.tensor_parallel_size > 1 and name not in replicated:
                why = "is divided among tensor-parallel ranks; use an elementwise optimizer"
            else:
                continue
            raise ValueError(f"{type(self.optimizer).__name__} updates whole matrices, and {name!r} {why}")
        return names

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _place_buffers(self) -> None:
        """Allocate flat buffers, make whole tensors views of them, and create the shards."""
        for bucket in self.buckets:
            with torch.no_grad():
                bucket.weights_from_module(self.mask.view)
            if bucket.layout.is_whole:
                for part, slot in zip(bucket.layout.slices, bucket.weight_slots, strict=True):
                    self._parameters[part.piece.parameter].data = slot
            if bucket.group is not None:
                bucket.make_shard(offload=self._offload, pin_memory=self._pin_memory)
            bucket.drop_weights()

    @torch.no_grad()
    def refresh_shards(self) -> None:
        """Update the shards after weights were changed from outside (dense view, checkpoint). fp32 values that still
        round to the weight are kept."""
        for bucket in self.held:
            if bucket.layout.is_whole:
                self._restore_views(bucket)
            else:
                bucket.weights_from_module(self.mask.view)
            bucket.shard_from_weights()
            bucket.drop_weights()

    def offload_states(self, *, states: bool = True, masters: bool = True, pin_memory: bool = False) -> None:
        """Move optimizer state and fp32 copies of weights to host memory, until `reload_states`. Copies that are
        stepped as whole tensors stay, since those are views."""
        tensors = [value for state in self.optimizer.state.values() for value in state.values()] if states else []
        copies = [bucket for bucket in self.held if not bucket.steps_in_place and bucket.layout.owner is None]
        tensors += [bucket.shard for bucket in copies] if masters else []
        self._moved += move_to_host(filter(torch.is_tensor, tensors), pin_memory=pin_memory)
        self._is_offloaded |= states or masters

    def reload_states(self) -> None:
        """Move back what `offload_states` moved."""
        move_back(self._moved)
        self._moved, self._is_offloaded = [], False

    def _restore_views(self, bucket: Bucket) -> None:
        """Make tensors whose `.data` was replaced views of the bucket again, with their new values."""
        for part, slot in zip(bucket.layout.slices, bucket.weight_slots, strict=True):
            parameter = self._parameters[part.piece.parameter]
            if parameter.data_ptr() != slot.data_ptr():
                slot.copy_(parameter.detach())
                parameter.data = slot

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _on_gradient(self, name: str) -> None:
        """Hook: a gradient has been accumulated in a tensor's `.grad`."""
        if not self.mask.is_applied:
            raise RuntimeError(
                "a backward pass inside engine.dense(): use torch.autograd.grad, or leave the context first"
            )
        indices = self._buckets_of[name]
        if name in self._seen:  # for example with reentrant activation checkpointing
            self._repeated.add(name)
        self._seen.add(name)
        if indices[0] < self._next:
            if self.stage == 2 and self._is_first_pass:
                return  # `_reduce_again` handles it
            raise RuntimeError(
                f"a gradient of {name!r} came after its average was taken; call step() before the next backward pass, "
                "and enable activation checkpointing before deepspeed.initialize"
            )
        if self.stage < 2:
            self._accumulate(name)
        overlaps = self.overlap and self.is_last_micro_step and not self._is_first_pass
        if (self.stage == 2 or overlaps) and name not in self._repeated:
            for index in indices:
                self.held[index].waits_for.discard(name)
            complete = itertools.takewhile(lambda bucket: not bucket.waits_for, self.held[self._next :])
            self._reduce([bucket] for bucket in complete)

    def _slices_of(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the held slices of a parameter, or of its gradient."""
        dim, lengths = self._cuts[name]
        return (tensor,) if dim is None else tensor.split(lengths, dim)

    def _accumulate(self, name: str) -> None:
        """Move a gradient to its slots, or add it to what they have. The gradient of a whole tensor that has the slot's
        dtype becomes a view of the slot, in which autograd accumulates further ones."""
        parameter, places = self._parameters[name], self._slots_of[name]
        for index in self._buckets_of[name]:
            self.held[index].place_gradients(self._gradient_dtype)
        slots = [bucket.gradient_slots[number] for bucket, number in places]
        first, number = places[0]
        if first.layout.is_whole and slots[0].dtype == parameter.grad.dtype:
            if slots[0].data_ptr() != parameter.grad.data_ptr():
                slots[0].copy_(parameter.grad)
                parameter.grad = slots[0]
            return
        gradients = self._slices_of(name, parameter.grad)
        if first.filled[number]:
            torch._foreach_add_(slots, list(gradients))
        else:
            torch._foreach_copy_(slots, gradients)
            for bucket, number in places:
                bucket.filled[number] = True
        parameter.grad = None

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Called by the host after each backward pass, on every rank. Stage 2 reduces the remaining buckets; stages 0
        and 1 do so after the last micro-step with overlap, else in `step`."""
        is_first, self._is_first_pass = self._is_first_pass, False
        self._seen.clear()
        if self.stage == 2:
            self._reduce(self._sent_together(self.held[self._next :]))
            if is_first:
                self._reduce_again()
            self._num_reduced_passes += 1
            self._restart()
        elif self.overlap and self.is_last_micro_step:
            self._reduce(self._sent_together(self.held[self._next :]))

    def _restart(self) -> None:
        self._next = 0
        self._seen.clear()
        for bucket in self.held:
            bucket.waits_for.update(bucket.names)
            bucket.filled = [False] * len(bucket.filled)

    def _reduce(self, lists: Iterable[Sequence[Bucket]]) -> None:
        """Average the next buckets in `held`, those of one list together."""
        views: dict[str, Sequence[torch.Tensor]] = {}
        for buckets in lists:
            with self._on_side_stream():
                for index, bucket in enumerate(buckets, self._next):
                    self._pack(bucket, index, views)
                self._average(buckets)
            self._next += len(buckets)

    def _sent_together(self, buckets: Sequence[Bucket], *, gathers: bool = False) -> Iterator[list[Bucket]]:
        """Group consecutive buckets whose holders exchange shards directly, so that a rank waits for others less often;
        this rank receives at most `bucket_size` elements for a group of several. Other buckets are sent one by one.

        Args:
            gathers: whether they are all-gathered, not reduce-scattered.
        """
        together: list[Bucket] = []
        num_received = 0
        for bucket in buckets:
            group = bucket.holder_group
            is_direct = group.gathers_directly if gathers else group.scatters_directly
            is_direct = is_direct and not bucket.steps_all and bucket.layout.owner is None
            count = received_elements(bucket.layout.size, group)
            fits = is_direct and num_received + count <= self._bucket_size
            if together and not (fits and bucket.layout.dtype == together[0].layout.dtype):
                yield together
                together, num_received = [], 0
            together.append(bucket)
            num_received += count if is_direct else self._bucket_size
        if together:
            yield together

    def _reduce_again(self) -> None:
        """Reduce buckets again whose tensors got another gradient after their average was taken, on any rank."""
        left = [any(self._parameters[name].grad is not None for name in bucket.names) for bucket in self.held]
        group = self.groups.data_parallel
        with self._on_side_stream():  # after the averages
            flags = torch.zeros(self._num_buckets, dtype=torch.int32, device=self._device)
            flags[[number for number, is_left in zip(self._numbers, left, strict=True) if is_left]] = 1
            if group.size > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=group.process_group)
            again = flags.nonzero().flatten().tolist()
        for index, (number, bucket) in enumerate(zip(self._numbers, self.held, strict=True)):
            if number in again:
                self._next = index
                self._repeated.update(bucket.names)
                self._reduce([[bucket]])

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Context on the side stream, after the work that is queued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _pack(self, bucket: Bucket, index: int, views: dict[str, Sequence[torch.Tensor]]) -> None:
        """Fill the slots that have no gradient yet, with zeros for missing gradients; free `.grad` of finished tensors.

        Args:
            index: of the bucket in `held`.
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
                views[name] = self._slices_of(name, gradient)
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
        if self.stage == 2:
            for name in bucket.names:
                if self._buckets_of[name][-1] == index:  # no later bucket contains a part of it
                    self._parameters[name].grad = None

    def _average(self, buckets: Sequence[Bucket]) -> None:
        """Average gradients over the holders: their sum, divided by their number.

        Args:
            buckets: of one dtype, see `_sent_together`.
        """
        first, groups, sizes = buckets[0], [b.holder_group for b in buckets], [b.layout.size for b in buckets]
        flats = [bucket.gradients for bucket in buckets if bucket.gradients is not None]
        wire, step_dtype = self._wire_dtype or flats[0].dtype, first.step_dtype
        if wire != flats[0].dtype:
            buffers = torch.empty(sum(sizes), dtype=wire, device=self._device).split(sizes)
            flats = [buffer.copy_(flat) for buffer, flat in zip(buffers, flats, strict=True)]
        if wire == torch.float16:  # the sum may overflow although the mean does not
            for flat, group in zip(flats, groups, strict=True):
                flat.div_(group.size)
        if first.steps_all:
            if groups[0].size > 1:
                groups[0].comm.all_reduce(flats[0], group=groups[0].process_group)
            averages = [flats[0].to(step_dtype)]
        else:
            averages = [bucket.shard_of(bucket.gradients) for bucket in buckets if bucket.gradients is not None]
            if self.stage == 2 or averages[0].dtype != step_dtype:
                averages = [torch.empty_like(average, dtype=step_dtype) for average in averages]
            if first.layout.owner is not None:
                reduce(averages[0], flats[0], groups[0], first.layout.owner)
            else:
                reduce_scatter(averages, flats, groups)
        for bucket, group, average in zip(buckets, groups, averages, strict=True):
            if wire != torch.float16:
                average.div_(group.size)
            if bucket.host is not None:
                bucket.gradient = bucket.host.receive_gradient(average, adds=bucket.gradient is not None)
            else:
                bucket.gradient = average if bucket.gradient is None else bucket.gradient.add_(average)
            if self.stage == 2:
                bucket.drop_gradients()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the remaining gradients after the last micro-step. Collective; called by `step`."""
        if self.stage < 2:
            self._reduce(self._sent_together(self.held[self._next :]))
        elif not self._num_reduced_passes:
            self.finish_backward()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._offload and self._device.type == "cuda":  # the host reads gradients next
            torch.cuda.current_stream(self._device).synchronize()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        if self._stream is not None:  # its reductions may still use the gradients
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self.held:
            bucket.gradient = None
            bucket.set_gradients(None)
            bucket.drop_gradients()
        self._num_reduced_passes = 0
        self._restart()

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0, *, check_overflow: bool = False) -> bool:
        """Average the remaining gradients, clip, update, return weights, drop gradients. Collective.

        Args:
            loss_scale: factor of the losses.
            check_overflow: whether to skip the update on all ranks if the gradient is not finite.

        Returns:
            Whether weights were updated.
        """
        if len(self.optimizer.param_groups) != self._num_param_groups:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} param groups, but had {self._num_param_groups} "
                "when the engine was built; add them before deepspeed.initialize"
            )
        if self._is_offloaded:
            raise RuntimeError("the optimizer's state is in host memory; call reload_states() before step()")
        self.average_gradients()
        gradients = [bucket.gradient for bucket in self.held if bucket.gradient is not None]
        self.norm = gradient_norm(self._owned_gradients(), self._device) / loss_scale
        if check_overflow and not torch.isfinite(self.norm):
            self.zero_grad()
            return False
        scale_gradients(gradients, self.norm, self.clip, loss_scale)
        for bucket in self.buckets:
            if bucket.layout.is_whole:
                self._restore_views(bucket)
        for bucket, gradient in zip(self.held, gradients, strict=True):
            bucket.set_gradients(gradient)
        self.optimizer.step()
        for bucket in self.held:
            bucket.set_gradients(None)
            bucket.gradient = None
        self.return_weights(over_gradients=True)
        self.zero_grad()
        return True

    def _owned_gradients(self) -> list[torch.Tensor]:
        """Gradients of the shards that this rank counts in the norm; in stage 0, too, each holder counts one shard."""
        counted = [b for b in self.held if not b.layout.is_replicated or self.groups.tensor_parallel_rank == 0]
        return [b.shard_of(b.gradient) if b.steps_all else b.gradient for b in counted if b.gradient is not None]

    def _all_step(self, bucket: Bucket) -> bool:
        return bucket.steps_all and len(bucket.layout.holders) == self.groups.data_parallel.size

    @torch.no_grad()
    def return_weights(self, *, over_gradients: bool = False) -> None:
        """Write updated shards to the module's tensors, of the holders, or in the backward regime of all ranks.
        Collective; after a step, and when a checkpoint has changed shards.

        Args:
            over_gradients: whether gradients are not needed any more, so that their memory can be used.
        """
        if self.regime == "forward":
            views: dict[str, Sequence[torch.Tensor]] = {}
            for buckets in self._sent_together(self.held, gathers=True):
                first, groups = buckets[0], [bucket.holder_group for bucket in buckets]
                for bucket in buckets:
                    bucket.place_weights(over_gradients=over_gradients)
                    bucket.shard_to_weights()
                flats = [bucket.weights for bucket in buckets if bucket.weights is not None]
                if not first.steps_all and first.layout.owner is not None:
                    broadcast(flats[0], groups[0], first.layout.owner)
                elif not first.steps_all:
                    shards = [bucket.shard_of(flat) for bucket, flat in zip(buckets, flats, strict=True)]
                    all_gather(flats, shards, groups)
                for bucket in buckets:
                    if not bucket.layout.is_whole:
                        for name in bucket.names:
                            if name not in views:
                                views[name] = self._slices_of(name, self._parameters[name].detach())
                        slices = [views[name][place] for name, place in bucket.places]
                        torch._foreach_copy_(slices, bucket.weight_slots)
                        bucket.drop_weights()
            return
        for bucket in self.buckets:
            if self._all_step(bucket):
                bucket.place_weights(over_gradients=over_gradients)
                bucket.shard_to_weights()
                bucket.weights_to_module(self.mask.view)
                bucket.drop_weights()
        everyone = self.groups.data_parallel
        for returned in self._returns:
            returned.run(everyone, self.mask.view, over_gradients=over_gradients)

    def has_gradients(self) -> bool:
        """Whether there are gradients of an unfinished step."""
        return any(bucket.gradient is not None or any(bucket.filled) for bucket in self.held) or any(
            parameter.grad is not None for parameter in self._parameters.values()
        )

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Tensors of gradients besides `.grad`: averages and accumulation buffers."""
        averages = [bucket.gradient for bucket in self.held if bucket.gradient is not None]
        buffers = [bucket.gradients for bucket in self.held]
        return averages + [buffer for buffer in buffers if buffer is not None]

    def close(self) -> None:
        """Remove the hooks; the module's tensors and the optimizer's shards are unchanged."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for group in self._fused:
            group["fused"] = None

    # ---- state, for checkpoints and re-planning --------------------------------------------------------------------

    @torch.no_grad()
    def shard_parts(self, *, owned: bool) -> list[ShardPart]:
        """`Bucket.parts` of all held buckets, with the module's current values."""
        for bucket in self.buckets:
            if bucket.layout.is_whole:
                self._restore_views(bucket)
        return [part for bucket in self.held for part in bucket.parts(owned=owned)]
