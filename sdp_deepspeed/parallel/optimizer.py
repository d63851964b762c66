"""The optimizer, sharded over the holders of each slice (ZeRO stages 1 and 2; stage 0 runs as stage 1).

A bucket (buckets.py) has slices of parameters with the same holders, of adjacent layers (a depth range). A step
(`ShardedOptimizer.step`), for every bucket that this rank holds:

1. Gradients are averaged (`Reducer.finish_step`): reduce-scattered over the holders and divided by their number. Of H
   holders, the one at position i owns the i-th of H equal shards of the bucket, and has the average of that shard.
   Stage 1 does this after the last micro-step; stage 2 does it in every backward pass, where owners accumulate their
   shards and local gradients are freed.
2. The norm of the whole gradient is computed (`gradient_norm`): each rank sums the squares of its own shards, and one
   all-reduce over all ranks adds them. Gradients are clipped, or the step is skipped. (DeepSpeed's Muon: muon.py.)
3. The optimizer steps fp32 shards. If it updates whole tensors (Muon), it steps the tensors that this rank owns: their
   gradients are reduced to it, and their weights broadcast from it.
4. Updated weights are all-gathered. Forward regime: each bucket over its holders. Backward regime: every rank runs the
   whole model, so for each depth range and dtype there is one all-gather over all data-parallel ranks
   (`_gather_range`), to which each rank contributes all of its shards, padded to the largest share.

Memory of cut tensors: a bucket's flat gradients are allocated for the first of them; at stage 1 the average is a view
of these if it has their dtype. Both are freed after the optimizer's step. Then each bucket's flat weights are
allocated, gathered, copied to the parameters, and freed. Whole tensors and their gradients are views of flat buffers,
and are not copied.

# Order of collectives

`plan_buckets` (bucket_layouts.py) gives all ranks the same list of buckets, sorted by the depth at which the last
gradient is ready and by holders; it depends on facts that all ranks share, never on which gradients exist. Each rank
processes the buckets that it holds in this order, in every phase: averages of a backward pass, the norm, weights. A
bucket that is complete early waits for its turn.
Collectives are issued with `async_op=False` on one stream: the next one starts after the previous one has finished, so
two holder groups of a rank never communicate at once. (With overlap on a GPU it is a side stream; tensor-parallel
layers all-reduce activations on the current stream meanwhile, as in DeepSpeed.) The exception is over gloo: if ranks
exchange shards directly (`collectives.exchange`), the messages of a bucket count as one collective, and a rank may post
those of consecutive buckets at once, without blocking, then wait for all.

This cannot deadlock, unless a rank raises an error. All ranks have the same phases: each backward pass that averages,
each norm (two in a step if Muon's updates are clipped), weights. Whether a step is skipped depends on the norm, which
all ranks share. Give each collective the key (number of the phase, position in it); the all-reduce of a norm has
position 0. Barriers and collectives of the control group are phases, too. They are calls of all ranks in program order,
between other phases: `engine.step` has a barrier before the phases of the step (stage 2, if the caller sets the
boundary), and after them those of checks and new plans.

The members of a collective agree on its key, and each rank issues its collectives in ascending order of keys. Suppose
that some collective never finishes, and take the one with the smallest key. All collectives with smaller keys have
finished, so none of its members waits in another one: each is inside it or has posted its messages, or is computing and
will. Hence all members arrive, and it finishes: a contradiction. Tensor-parallel layers do not change this: the ranks
of such a group hold the same buckets, so all of them insert its collectives at the same position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sdp_deepspeed.parallel.boxes import Box, shard_boxes
from sdp_deepspeed.parallel.bucket_layouts import plan_buckets
from sdp_deepspeed.parallel.buckets import Bucket, place_in_buckets, sent_together
from sdp_deepspeed.parallel.collectives import all_gather, broadcast
from sdp_deepspeed.parallel.dense_gathers import gather_flat
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.muon import is_deepspeeds_muon, orthogonalize, step_with_updates
from sdp_deepspeed.parallel.norm import gradient_norm, scale_gradients
from sdp_deepspeed.parallel.offload import Moved, move_back, move_to_host
from sdp_deepspeed.parallel.optimizer_kinds import tensors_stepped_whole
from sdp_deepspeed.parallel.param_groups import prefer_fused, replace_parameters
from sdp_deepspeed.parallel.reducer import Reducer
from sdp_deepspeed.parallel.step_options import StepOptions

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask


class ShardedOptimizer:
    """Steps an optimizer on the shards or whole tensors that this rank owns. Every rank constructs it, with equal
    options.

    Args:
        optimizer: optimizer of the dense model's parameters, not stepped yet. Parameters in its param groups are
            replaced by this rank's shards; other options are unchanged.
        mask: this rank's subnetwork, applied: pieces of dense tensors with their holders, and views of those held.
        param_group_of: param group index of each trained tensor, by dense name. The same on all ranks: parameters that
            the user froze are excluded, those that only the mask froze on this rank are included.
        tp_replicated: tensors that are equal on all tensor-parallel ranks; the norm counts them once.

    Attributes:
        reducer: accumulates and averages gradients; the engine calls it around backward passes.
        norm: norm of the last step's averaged gradient before clipping (with `clips_updates`, of updates and other
            gradients); None before the first step.
        held: buckets of which this rank is a holder, in the order of collectives.
        buckets: `held`; in the backward regime all buckets.
        mode: mode of an optimizer with `train` and `eval`; None until `change_mode`, and after a checkpoint is loaded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mask: Mask,
        groups: Groups,
        param_group_of: Mapping[str, int],
        options: StepOptions,
        *,
        tp_replicated: Collection[str],
    ) -> None:
        self.optimizer, self.mask, self.groups, self.options = optimizer, mask, groups, options
        self._gathers_all = mask.plan.regime == "backward"
        self._clips_updates = options.clips_updates and options.clip > 0 and is_deepspeeds_muon(optimizer)
        self.param_group_of = dict(param_group_of)
        self.norm: torch.Tensor | None = None
        self.mode: str | None = None
        self._parameters = {name: mask.parameters[name] for name in param_group_of}
        self._device = next(iter(self._parameters.values())).device
        layouts = plan_buckets(
            {name: pieces for name, pieces in mask.pieces.items() if name in param_group_of},
            mask.shapes,
            {name: parameter.dtype for name, parameter in self._parameters.items()},
            param_group_of,
            bucket_size=options.bucket_size,
            tp_replicated=tp_replicated,
            stepped_whole=tensors_stepped_whole(
                optimizer, param_group_of, mask, tp_replicated=tp_replicated, is_divided=groups.tensor_parallel_size > 1
            ),
        )
        make = partial(Bucket, device=self._device, gradient_dtype=options.gradient_dtype)
        buckets = [make(layout, groups.of(layout.holders)) for layout in layouts]
        self.held = [bucket for bucket in buckets if bucket.is_held]
        self.buckets = buckets if self._gathers_all else self.held
        self._tensors = place_in_buckets(self.held, self._parameters, mask.pieces, groups.rank)
        self._allocate_buffers()
        self.reducer = Reducer(mask, self._parameters, self._tensors, self.held, options)
        stepped: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for bucket in self.held:
            stepped[bucket.layout.param_group] += bucket.parameters
        replace_parameters(optimizer, stepped)
        self._fused = prefer_fused(optimizer)  # param groups with a fused kernel
        self._num_param_groups = len(optimizer.param_groups)
        self._moved: Moved = []
        self._is_offloaded = False

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0, *, check_overflow: bool = False) -> bool:
        """Average the remaining gradients, clip, step, all-gather weights, drop gradients. Collective.

        `skips_overflow` (engine/optimizer_options.py) says when overflow skips a step; engine/zero_optimizer.py updates
        the loss scale.

        Args:
            loss_scale: factor by which losses were multiplied; gradients are divided by it.
            check_overflow: whether to skip the update on all ranks if the gradient is not finite.

        Returns:
            Whether weights were updated.

        Raises:
            RuntimeError: param groups were added since the constructor, or the optimizer's state is in host memory.
        """
        if len(self.optimizer.param_groups) != self._num_param_groups:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} param groups, but had {self._num_param_groups} "
                "when the engine was built; add them before deepspeed.initialize"
            )
        self._refuse_offloaded("step()")
        self.reducer.finish_step()
        is_stepped = self._step_shards(loss_scale, check_overflow=check_overflow)
        self.reducer.zero_grad()  # before weights are gathered into memory of their own
        if is_stepped:
            self._gather()
        return is_stepped

    def refuse_unfinished(self, call: str) -> None:
        """Raise RuntimeError if there are gradients of an unfinished step."""
        if self.reducer.has_gradients():
            raise RuntimeError(
                f"{call}: gradients of an unfinished step exist; call it after engine.step() at the end of an "
                "accumulation, or call engine.zero_grad() first"
            )

    def _step_shards(self, loss_scale: float, *, check_overflow: bool) -> bool:
        """Step by clipped gradients, or by clipped updates (muon.py); sets `norm` to theirs. Returns whether it did."""
        gradients = [bucket.expose_average() for bucket in self.held]
        self.norm = self._norm_of(gradients) / loss_scale
        if check_overflow and not torch.isfinite(self.norm):
            return False
        self._restore_views()  # users may have replaced `.data`
        if not self._clips_updates:
            scale_gradients(gradients, self.norm, self.options.clip, loss_scale)
            self.optimizer.step()
            return True
        scale_gradients(gradients, self.norm, 0.0, loss_scale)
        orthogonalize(self.optimizer)  # in place
        self.norm = self._norm_of(gradients)
        scale_gradients(gradients, self.norm, self.options.clip, 1.0)
        step_with_updates(self.optimizer)
        return True

    def _norm_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm over all ranks of the shards' gradients. The first tensor-parallel rank counts what all have."""
        is_first = self.groups.tensor_parallel_rank == 0
        pairs = zip(self.held, gradients, strict=True)
        counted = [gradient for bucket, gradient in pairs if is_first or not bucket.layout.is_tp_replicated]
        return gradient_norm(counted, self._device)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """All-gather weights from shards that a checkpoint has changed. Collective."""
        self.mode = None  # a checkpoint may be of another one
        self._gather()

    def _gather(self) -> None:
        """All-gather weights from their shards: over the holders, in the backward regime over all data-parallel ranks.
        Collective."""
        if not self._gathers_all:
            self._gather_shards()
        else:
            ranges: defaultdict[tuple[int, torch.dtype], list[Bucket]] = defaultdict(list)
            for bucket in self.buckets:
                ranges[bucket.layout.depth_range, bucket.layout.dtype].append(bucket)
            for buckets in ranges.values():
                self._gather_range(buckets)

    def _gather_range(self, buckets: Sequence[Bucket]) -> None:
        """All-gather the shards of the buckets of a depth range and dtype over all ranks. What it receives is freed on
        return."""
        group, sizes, mine = self.groups.data_parallel, [], []
        for bucket in buckets:
            owners = bucket.layout.owners
            sizes += [(owner, bucket.layout.size // len(owners)) for owner in owners]
            if group.position in owners:
                bucket.weights.allocate()
                mine.append(bucket.shard_to_weights())
        received = iter(gather_flat(sizes, mine, group, buckets[0].layout.dtype, self._device))
        for bucket in buckets:
            weights = bucket.weights.allocate()
            shards = weights.view(len(bucket.layout.owners), -1).unbind()
            torch._foreach_copy_(shards, [*itertools.islice(received, len(shards))])
            if bucket.layout.is_cut:  # whole tensors are views of the weights
                tensors = [self.mask.view(item.piece) for item in bucket.layout.slices]
                torch._foreach_copy_(tensors, bucket.weights.views)
            bucket.drop_weights()

    def _gather_shards(self) -> None:
        """All-gather each bucket over its holders. Whole tensors are views of it, and cut ones are copied from it."""
        views: dict[str, Sequence[torch.Tensor]] = {}  # of cut parameters: their held slices
        for together in sent_together(self.held, self.options.bucket_size, gathers=True):
            groups = [bucket.group for bucket in together]
            flats = [bucket.weights.allocate() for bucket in together]
            shards = [bucket.shard_to_weights() for bucket in together]
            stepping_position = together[0].layout.stepping_position
            if stepping_position is not None:
                broadcast(flats[0], groups[0], stepping_position)
            else:
                all_gather(flats, shards, groups)
            for bucket in together:
                if not bucket.layout.is_cut:
                    continue
                for name in bucket.layout.names:
                    if name not in views:
                        views[name] = self._tensors[name].slices(self._parameters[name].detach())
                torch._foreach_copy_(
                    [views[place.name][place.index_in_tensor] for place in bucket.places], bucket.weights.views
                )
                bucket.drop_weights()

    def change_mode(self, mode: str, change: Callable[[], Any]) -> None:
        """Call `train` or `eval` of an optimizer whose weights for evaluation differ from those for training
        (schedule-free), and all-gather the changed weights. Collective.

        Args:
            mode: "train" or "eval".
            change: the optimizer's method, which changes shards.

        Raises:
            RuntimeError: the optimizer's state is in host memory.
        """
        self._refuse_offloaded(f"optimizer.{mode}()")
        self._restore_views()
        change()
        self.gather_weights()
        self.mode = mode

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _allocate_buffers(self) -> None:
        """Allocate flat buffers, make whole tensors views of them, and create the shards."""
        for bucket in self.buckets:
            with torch.no_grad():
                bucket.weights_from_module(self.mask.view)
            bucket.restore_views(self._parameters)
            if bucket.is_held:
                bucket.make_shard(offload=self.options.offload, pin_memory=self.options.pin_memory)
            bucket.drop_weights()

    @torch.no_grad()
    def refresh_shards(self) -> None:
        """Update the shards after weights were changed from outside (dense view, checkpoint). fp32 values that still
        round to the weight are kept."""
        for bucket in self.held:
            if bucket.layout.is_cut:
                bucket.weights_from_module(self.mask.view)
            else:
                bucket.restore_views(self._parameters)
            bucket.shard_from_weights()
            bucket.drop_weights()

    def offload_states(self, *, states: bool = True, masters: bool = True, pin_memory: bool = False) -> None:
        """Move optimizer state and fp32 copies of weights to host memory, until `reload_states`. Copies that are
        stepped as whole tensors stay, since those are views."""
        tensors = [value for state in self.optimizer.state.values() for value in state.values()] if states else []
        copies = [
            bucket for bucket in self.held if not bucket.steps_in_place and bucket.layout.stepping_position is None
        ]
        tensors += [bucket.shard for bucket in copies] if masters else []
        self._moved += move_to_host(filter(torch.is_tensor, tensors), pin_memory=pin_memory)
        self._is_offloaded |= states or masters

    def reload_states(self) -> None:
        """Move back what `offload_states` moved."""
        move_back(self._moved)
        self._moved, self._is_offloaded = [], False

    def _refuse_offloaded(self, call: str) -> None:
        if self._is_offloaded:
            raise RuntimeError(f"the optimizer's state is in host memory; call reload_states() before {call}")

    def _restore_views(self) -> None:
        for bucket in self.buckets:
            bucket.restore_views(self._parameters)

    def close(self) -> None:
        """Remove the hooks; the module's tensors and the optimizer's shards are unchanged."""
        self.reducer.close()
        for group in self._fused:
            group["fused"] = None

    # ---- state, for checkpoints and re-planning --------------------------------------------------------------------

    @torch.no_grad()
    def boxes(self) -> list[Box]:
        """What this rank steps, with the module's current values. What a rank steps it owns."""
        self._restore_views()
        return [box for bucket in self.held for box in shard_boxes(bucket)]
