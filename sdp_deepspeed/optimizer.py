"""Masked averaging and ZeRO stages 0, 1, 2 behind DeepSpeed's optimizer surface (DESIGN.md sections 1, 4).

Stage 1: the owner of a shard averages it, steps it and sends the weights back. Stage 2: the same, but the averaging
happens during backward. Stage 0: the owner sends the average back and every holder steps all that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from .backward_reduction import BackwardReduction
from .communicator import Communicator
from .exchange import Exchange, Receivers, write
from .gradients import Gradients
from .param_groups import agree_on_groups
from .places import Places
from .plan import Plan
from .segments import NOT_OPTIMIZED, Bucket, Fragment, Segment, TensorInfo, build_buckets, build_segments
from .stepping import SteppedGroup, repoint


@dataclass(frozen=True)
class OptimizerSettings:
    """Options that DeepSpeed's config gives to the optimizer.

    Args:
        stage: ZeRO stage, 0, 1 or 2.
        clip: largest norm of the averaged dense gradient; 0 switches clipping off.
        bucket_elements: most elements that a rank packs for one exchange (`reduce_bucket_size`).
        wire_dtype: of gradients on the wire (`communication_data_type`).
        accumulate_in_fp32: keep gradients in fp32 between micro-steps (`data_types.grad_accum_dtype`).
        max_in_flight: stage 2: buckets whose exchange may run while backward goes on (`overlap_comm`).
        skip_overflow: leave a step out on all ranks when any rank's gradient is not finite.
    """

    stage: int
    clip: float
    bucket_elements: int
    wire_dtype: torch.dtype
    accumulate_in_fp32: bool = False
    max_in_flight: int = 0
    skip_overflow: bool = False


class SubnetworkOptimizer(ZeROOptimizer):
    """Wraps an elementwise optimizer: averages over holders, steps, keeps holders identical.

    Every data-parallel rank must call `step`. At stages 0 and 1 gradients are local between `backward` and `step`; the
    exchange happens in `step`, so that any number of backward passes may come before it. At stage 2 every rank must
    call `end_backward` after each.

    Args:
        optimizer: with the full model's parameters in its groups, as the user built it.
        parameters: the module's parameters by dense name.
        tensors: dense shapes in model order, recorded before units were dropped.
        plan: who holds what.
        places: where pieces lie in this rank's parameters; None if those are the dense model's.
        communicator: the data-parallel group.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None
    loss_scaler = None
    loss_scale = 1.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        tensors: Sequence[TensorInfo],
        plan: Plan,
        communicator: Communicator,
        settings: OptimizerSettings,
        places: Places | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.settings = settings
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._communicator = communicator
        self._parameters = dict(parameters)
        self._places = places or Places(self._parameters)
        self._everyone_updates = plan.regime == "backward"
        tensors = agree_on_groups(optimizer, tensors, self._parameters, communicator, settings=repr(settings))
        self._gradients = Gradients(
            self._parameters, self._places, accumulate_in_fp32=settings.accumulate_in_fp32 and settings.stage < 2
        )
        self._device = next(iter(self._parameters.values())).device
        self.exchange = self._build_exchange(tensors, plan)
        self.groups = [self._stepped_group(index) for index in range(len(optimizer.param_groups))]
        self._last_use = self.exchange.last_uses()
        self._reduction = self._reduce_in_backward() if settings.stage == 2 else None
        repoint(optimizer, self.groups)

    def _build_exchange(self, tensors: Sequence[TensorInfo], plan: Plan) -> Exchange:
        limit = self.settings.bucket_elements
        optimized = [info for info in tensors if info.group != NOT_OPTIMIZED]
        segments = build_segments(optimized, plan, max_elements=limit)
        buckets = build_buckets(
            segments,
            size=self._communicator.size,
            max_elements=limit,
            everyone_updates=self._everyone_updates,
        )
        return Exchange(buckets, self._communicator, device=self._device, dtype=self.settings.wire_dtype)

    def _reduce_in_backward(self) -> BackwardReduction:
        return BackwardReduction(
            self.exchange,
            self._gradients,
            self._communicator,
            self._parameters,
            group_sizes=[group.num_elements for group in self.groups],
            dtype=torch.float32 if self.settings.accumulate_in_fp32 else next(iter(self._parameters.values())).dtype,
            max_in_flight=self.settings.max_in_flight,
        )

    def end_backward(self) -> None:
        """Stage 2: send what has not left; every data-parallel rank calls it after each backward pass."""
        if self._reduction is not None:
            self._reduction.end_round()

    def _stepped_group(self, index: int) -> SteppedGroup:
        fragments = [
            fragment
            for bucket in self.exchange.buckets
            for segment, shard in self._stepped(bucket)
            if segment.group == index
            for fragment in shard
        ]
        return SteppedGroup(fragments, self._places.weight)

    def _stepped(self, bucket: Bucket) -> list[tuple[Segment, list[Fragment]]]:
        if self.settings.stage:
            return self.exchange.owned(bucket)
        rank = self._communicator.rank
        return [(segment, list(segment.fragments)) for segment in bucket.segments if segment.held_by(rank)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Average, clip, step, send back; a collective of the data-parallel group.

        Raises:
            ValueError: a closure is given, which would need a forward pass of all ranks.
        """
        if closure is not None:
            raise ValueError("SubnetworkOptimizer.step() takes no closure; call engine.backward(loss) before it")
        averages, squares = self._average()
        self._global_grad_norm = float(self._communicator.sum(squares).sqrt())
        finite = self._global_grad_norm - self._global_grad_norm == 0.0
        self.overflow = self.settings.skip_overflow and not finite
        if not self.overflow:
            self._clip(averages)
            self._take_step(averages)
        self.zero_grad()

    def _average(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Owned averages as one flat fp32 gradient per group (not stage 0), and their sum of squares (float64)."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._reduction is not None:
            flats = self._reduction.take()
            return flats, squares + sum(norm.double() ** 2 for norm in torch._foreach_norm(flats))
        kept = [torch.empty(self._kept(group), device=self._device) for group in self.groups]
        position = [0] * len(self.groups)
        for bucket in self.exchange.buckets:
            averages = []
            for segment, fragments in self.exchange.owned(bucket):
                length = sum(fragment.stop - fragment.start for fragment in fragments)
                if self.settings.stage == 1:
                    averages.append(kept[segment.group].narrow(0, position[segment.group], length))
                    position[segment.group] += length
                else:
                    averages.append(torch.empty(length, device=self._device))
            self.exchange.reduce(bucket, self._gradients.view, averages)
            for norm in torch._foreach_norm(averages) if averages else []:
                squares += norm.double() ** 2
            self._after_reduce(bucket, averages)
        return kept, squares

    def _kept(self, group: SteppedGroup) -> int:
        return group.num_elements if self.settings.stage == 1 else 0

    def _after_reduce(self, bucket: Bucket, averages: list[torch.Tensor]) -> None:
        if self.settings.stage == 1:
            for name in self._last_use[bucket.index]:
                self._gradients.free(name)
            return
        for name in self.exchange.held_names(bucket):
            self._gradients.make(name)
        for (_, fragments), average in zip(self.exchange.owned(bucket), averages, strict=True):
            write(
                self._gradients.view,
                fragments,
                average.split([fragment.stop - fragment.start for fragment in fragments]),
            )
        self.exchange.distribute(bucket, self._gradients.view)

    def _clip(self, averages: list[torch.Tensor]) -> None:
        """Scale the averaged gradient as DeepSpeed does: by 1 / max(1, (norm + 1e-6) / clip)."""
        assert self._global_grad_norm is not None
        if self.settings.clip <= 0:
            return
        factor = max(1.0, (self._global_grad_norm + 1e-6) / self.settings.clip)
        if self.settings.stage == 0:
            averages = [p.grad for p in self._parameters.values() if p.grad is not None]
        if factor != 1.0 and averages:
            torch._foreach_div_(averages, factor)

    def _take_step(self, averages: list[torch.Tensor]) -> None:
        for group, flat in zip(self.groups, averages, strict=True):
            group.link()
            if self.settings.stage:
                group.set_flat_gradient(flat)
            else:
                group.set_gradients(self._gradients.view)
        self.optimizer.step()
        for group in self.groups:
            group.write_back()
        self._send_weights()

    def _send_weights(self) -> None:
        if self.settings.stage:
            receivers: Receivers = "all" if self._everyone_updates else "holders"
        elif self._everyone_updates:
            receivers = "others"
        else:
            return
        for bucket in self.exchange.buckets:
            self.exchange.distribute(bucket, self._places.weight, receivers=receivers)

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Local gradients that exist now, for measurements."""
        kept = self._reduction.tensors() if self._reduction is not None else []
        return self._gradients.tensors() + kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all local gradients and accumulators."""
        for name in self._parameters:
            self._gradients.free(name)
        if self._reduction is not None:
            self._reduction.drop()

    def refresh_fp32_params(self) -> None:
        """Take fp32 masters from the weights again, after weights came from outside."""
        for group in self.groups:
            group.reload_master()

    def state_dict(self) -> dict[str, Any]:
        """This rank's share: wrapped optimizer's state and masters, valid on the same layout only."""
        masters = [None if group.in_place else group.tensors[0].detach() for group in self.groups if group.fragments]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        own = [group for group in self.groups if group.fragments]
        for group, master in zip(own, state["masters"], strict=True):
            if master is not None:
                group.tensors[0].data.copy_(master)
