"""Masked averaging and ZeRO stages 0, 1, 2 behind DeepSpeed's optimizer surface (DESIGN.md sections 1, 4).

Stage 1: the owner of a shard averages it, steps it and sends the weights back. Stage 2: the same, but the averaging
happens during backward. Stage 0: the owner sends the average back and every holder steps all that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.averaging import Averages, Averaging, StepAveraging, divide, global_norm, pipelined
from sdp_deepspeed.exchange.backward_averaging import BackwardReduction
from sdp_deepspeed.exchange.exchange import Exchange, Receivers
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.places import Places
from sdp_deepspeed.layout.segments import (
    NOT_OPTIMIZED,
    Bucket,
    Fragment,
    Segment,
    TensorInfo,
    build_buckets,
    build_segments,
)
from sdp_deepspeed.optimizer.param_groups import agree_on_groups
from sdp_deepspeed.optimizer.stepped_group import Offload, SteppedGroup, repoint
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.tensor_parallel.group import ModelParallel


@dataclass(frozen=True)
class OptimizerSettings:
    """Options that DeepSpeed's config gives to the optimizer.

    Args:
        stage: ZeRO stage, 0, 1 or 2.
        clip: largest norm of the averaged dense gradient; 0 switches clipping off.
        bucket_elements: most elements that a rank packs for gradients in one exchange (`reduce_bucket_size`).
        return_bucket_elements: the same for weights that return (`allgather_bucket_size`); None as `bucket_elements`.
        wire_dtype: of gradients on the wire (`communication_data_type`).
        accumulate_in_fp32: keep gradients in fp32 between micro-steps (`data_types.grad_accum_dtype`).
        max_in_flight: buckets whose exchange may run while backward, packing or unpacking goes on (`overlap_comm`).
        skip_overflow: leave a step out on all ranks when any rank's gradient is not finite.
        offload: where masters and moments live, None on the device of the weights.
        needs_norm: without it, clipping and `skip_overflow` no norm is computed (`compute_grad_norm`).
    """

    stage: int
    clip: float
    bucket_elements: int
    wire_dtype: torch.dtype
    return_bucket_elements: int | None = None
    accumulate_in_fp32: bool = False
    max_in_flight: int = 0
    skip_overflow: bool = False
    offload: Offload | None = None
    needs_norm: bool = True


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
        model_parallel: the tensor-parallel group, None without one.
        loss_scaler: DeepSpeed's, for fp16; None scales by 1.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None

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
        model_parallel: ModelParallel | None = None,
        loss_scaler: LossScalerBase | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.settings = settings
        self.overflow = False
        self.loss_scaler = loss_scaler or LossScaler(scale=1.0)
        self.external_loss_scale: float | None = None
        self._global_grad_norm: float | None = None
        self._communicator = communicator
        self._model_parallel = model_parallel
        self._parameters = dict(parameters)
        self._places = places or Places(self._parameters)
        self._everyone_updates = plan.regime == "backward"
        self.tensors = agree_on_groups(optimizer, tensors, self._parameters, communicator, settings=repr(settings))
        if model_parallel is not None:
            model_parallel.complete_gradients(self._parameters)
        self._gradients = Gradients(
            self._parameters, self._places, accumulate_in_fp32=settings.accumulate_in_fp32 and settings.stage < 2
        )
        self.exchange, self._returning = self._build_exchanges(self.tensors, plan)
        self.groups = [self._stepped_group(index) for index in range(len(optimizer.param_groups))]
        self._averaging = self._build_averaging()
        repoint(optimizer, self.groups)

    def _build_exchanges(self, tensors: Sequence[TensorInfo], plan: Plan) -> tuple[Exchange, Exchange]:
        """For gradients and for weights that return: the same shards, perhaps in buckets of other sizes."""
        limits = [self.settings.bucket_elements, self.settings.return_bucket_elements or self.settings.bucket_elements]
        optimized = [info for info in tensors if info.group != NOT_OPTIMIZED]
        segments = build_segments(optimized, plan, max_elements=min(limits))
        device = next(iter(self._parameters.values())).device
        gradients, weights = (
            Exchange(
                build_buckets(
                    segments, size=self._communicator.size, max_elements=limit, everyone_updates=self._everyone_updates
                ),
                self._communicator,
                device=device,
                dtype=self.settings.wire_dtype,
            )
            for limit in limits
        )
        return gradients, weights

    def _build_averaging(self) -> Averaging:
        options: dict[str, Any] = {
            "group_sizes": [group.num_elements for group in self.groups],
            "max_in_flight": self.settings.max_in_flight,
            "model_parallel": self._model_parallel,
        }
        if self.settings.stage < 2:
            options["needs_one_flat"] = [not group.in_place for group in self.groups]
            return StepAveraging(self.exchange, self._gradients, keeps_flats=self.settings.stage == 1, **options)
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        has_one = len(dtypes) == 1 and not self.settings.accumulate_in_fp32
        return BackwardReduction(
            self.exchange,
            self._gradients,
            self._communicator,
            self._parameters,
            dtype=dtypes.pop() if has_one else torch.float32,
            **options,
        )

    def _stepped_group(self, index: int) -> SteppedGroup:
        fragments = [
            fragment
            for bucket in self.exchange.buckets
            for segment, shard in self._stepped(bucket)
            if segment.group == index
            for fragment in shard
        ]
        return SteppedGroup(fragments, self._places.weight, self.settings.offload)

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

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.loss_scaler.loss_scale if self.external_loss_scale is None else self.external_loss_scale

    @property
    def cur_scale(self) -> float:
        """The name under which DeepSpeed's monitor asks for `loss_scale`."""
        return self.loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """As DeepSpeed's: losses are scaled by this from now on."""
        self.custom_loss_scaler = True
        self.external_loss_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before backward: by `engine.backward`, or by `engine.scale`."""
        return bool(self.loss_scaler.dynamic or self.loss_scale != 1.0)

    def end_backward(self) -> None:
        """Every data-parallel rank calls it after each backward pass."""
        self._averaging.end_backward()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing: `step` takes whatever was accumulated (`managed_gradient_accumulation: false`)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Average, clip, step, send back; a collective of the data-parallel group.

        Raises:
            ValueError: a closure is given, which would need a forward pass of all ranks.
        """
        if closure is not None:
            raise ValueError("SubnetworkOptimizer.step() takes no closure; call engine.backward(loss) before it")
        averages = self._averaging.take()
        scaled_norm, scale = self._norm(averages), self.loss_scale
        self.overflow = self.settings.skip_overflow and not math.isfinite(scaled_norm or 0.0)
        self.loss_scaler.update_scale(self.overflow)
        norm = None if scaled_norm is None else math.inf if self.overflow else scaled_norm / scale
        self._global_grad_norm = norm if self.settings.needs_norm else None
        if not self.overflow:
            self._take_step(averages, self._divisor(norm, scale))
        self.zero_grad()

    def _norm(self, averages: Averages) -> float | None:
        """Of the averaged dense gradient, times the loss scale; None where nobody needs it."""
        if self.settings.needs_norm or self.settings.clip > 0 or self.settings.skip_overflow:
            return global_norm(averages.squares, self._communicator, self._model_parallel)
        return None

    def _divisor(self, norm: float | None, scale: float) -> float:
        """Of the averages: the loss scale, and where they are clipped DeepSpeed's max(1, (norm + 1e-6) / clip)."""
        if self.settings.clip > 0:
            assert norm is not None
            scale *= max(1.0, (norm + 1e-6) / self.settings.clip)
        return scale

    def _take_step(self, averages: Averages, divisor: float) -> None:
        for index, group in enumerate(self.groups):
            group.link()
            if averages.flats is None:
                group.set_gradients(self._gradients.view)
                divide([tensor.grad for tensor in group.tensors if tensor.grad is not None], divisor)
            else:
                divide(averages.flats[index], divisor)
                group.set_flat_gradient(*averages.flats[index])
                averages.flats[index].clear()  # on a GPU what was copied to the host may go
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
        pipelined(
            self._returning.buckets,
            lambda bucket: self._returning.start_distribute(bucket, self._places.weight, receivers=receivers),
            self._returning.finish_distribute,
            max_in_flight=self.settings.max_in_flight,
        )

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Gradients that exist now, for measurements."""
        return self._gradients.tensors() + self._averaging.tensors()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all local gradients and accumulators."""
        for name in self._parameters:
            self._gradients.free(name)
        self._averaging.drop()

    def refresh_fp32_params(self) -> None:
        """Take fp32 masters from the weights where those are no more the rounded masters: they came from outside."""
        for group in self.groups:
            group.reload_master()

    def state_dict(self) -> dict[str, Any]:
        """This rank's share: wrapped optimizer's state, masters and loss scale, valid on the same layout only."""
        masters = [None if group.in_place else group.tensors[0].detach() for group in self.groups if group.fragments]
        scaler = {key: value for key, value in vars(self.loss_scaler).items() if isinstance(value, (int, float))}
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "loss_scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        own = [group for group in self.groups if group.fragments]
        for group, master in zip(own, state["masters"], strict=True):
            if master is not None:
                group.tensors[0].data.copy_(master)
        if self.loss_scaler.dynamic:
            vars(self.loss_scaler).update(state["loss_scaler"])
