"""Masked averaging and ZeRO stages 0, 1, 2 behind DeepSpeed's optimizer surface.

Stage 1: the owner of a shard averages it, steps it and sends the weights back. Stage 2: the same, but the averaging
happens during backward. Stage 0: the owner sends the average back and every holder steps all that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.averaging import Averages, AveragingOptions, Pipeline, unscale
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Receivers
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.optimizer.exchanges import build_averaging, build_exchanges
from sdp_deepspeed.optimizer.fused import avoid_fused, choose_kernels, kernels_of, prefer_fused
from sdp_deepspeed.optimizer.host_step import HostStep
from sdp_deepspeed.optimizer.host_surface import HostSurface
from sdp_deepspeed.optimizer.learning_rates import check_parts, rate_factor, rates_by_coverage
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup, repoint
from sdp_deepspeed.optimizer.whole_tensors import check_state, log_owners
from sdp_deepspeed.tensor_parallel.group import TensorParallelGroup


class SubnetworkOptimizer(HostSurface):
    """Wraps an optimizer: averages over holders, steps, keeps holders identical.

    Every data-parallel rank must call `step`. At stages 0 and 1 gradients are local between `backward` and `step`; the
    exchange happens in `step`, so that any number of backward passes may come before it. At stage 2 every rank must
    call `end_backward` after each.

    Args:
        optimizer: with the full model's parameters in its groups, as the user built it.
        model: what this rank has, with the param groups that all ranks agree on (`agree_on_groups`).
        dp_group: the data-parallel group.
        settings: the config's.
        tp_group: the tensor-parallel group, None without one.
        loss_scaler: DeepSpeed's, for fp16; None scales by 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: RankModel,
        dp_group: Communicator,
        *,
        settings: OptimizerSettings,
        tp_group: TensorParallelGroup | None = None,
        loss_scaler: LossScalerBase | None = None,
    ) -> None:
        super().__init__(optimizer, loss_scaler or LossScaler(scale=1.0))
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._frozen_at_start: dict[str, torch.nn.Parameter] = {}  # though they are in a param group
        self._dp_group = dp_group
        self._tp_group = tp_group
        self._partial_sums: list[RemovableHandle] = []
        self._kernels = kernels_of(optimizer)
        self._lay_out(model, settings)

    def _lay_out(self, model: RankModel, settings: OptimizerSettings) -> None:
        """All that depends on the plan and the stage."""
        self.model = model
        self.settings = settings
        self._is_state_known = False
        self._all_receive_weights = model.stores_all
        self._parameters = model.parameters()
        self._gradients = Gradients(
            self._parameters,
            model.views,
            accumulate_in_fp32=settings.accumulate_in_fp32 and settings.stage < 2,
        )
        self.exchange, self.weight_exchange = build_exchanges(model, self._dp_group, settings)
        self._host = HostStep.build(self.exchange.device, settings.offload)
        self.groups = [self._stepped_group(index) for index in range(len(self.optimizer.param_groups))]
        self._averaging = build_averaging(
            self.exchange,
            self._gradients,
            AveragingOptions(
                self._dp_group,
                [group.num_elements for group in self.groups],
                settings.needs_norm or settings.clip > 0 or settings.skip_overflow,
                settings.max_in_flight,
                self._tp_group,
            ),
            settings=settings,
            parameters=self._parameters,
            needs_one_flat=[not group.in_place for group in self.groups],
        )

    def install(self) -> None:
        """Hook gradients and take over the wrapped optimizer's param groups; called once for each layout, by every
        rank."""
        log_owners(self.model)
        if self._tp_group is not None:
            self._partial_sums = self._tp_group.sum_partial_gradients(self._parameters)
        self._gradients.install()
        self._averaging.install()
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self._frozen_at_start |= {
            info.name: parameter
            for info in self.model.tensors
            if not info.trainable and id(parameter := self._parameters[info.name]) in given
        }
        repoint(self.optimizer, self.groups)
        if self.settings.stage:  # at stage 0 holders step the same elements, each at other places of its flat master
            prefer_fused(self.optimizer)
        elif any(info.dtype != torch.float32 for info in self.model.tensors if info.trainable):  # on all ranks alike
            avoid_fused(self.optimizer)

    def uninstall(self) -> None:
        """Inverse of `install`, but for the param groups; between steps."""
        for handle in self._partial_sums:
            handle.remove()
        self._gradients.uninstall()
        self._averaging.uninstall()

    def lay_out_anew(self, model: RankModel, settings: OptimizerSettings) -> None:
        """After `uninstall`: take another plan or stage, without the state of the wrapped one; every rank calls it.
        The wrapped optimizer, its param groups and their options stay the objects that they are.

        Args:
            model: with the param groups of its tensors, which are those of now; its tensors have storage.
            settings: the config's.
        """
        self.optimizer.state.clear()
        choose_kernels(self.optimizer, self._kernels)
        self._lay_out(model, settings)
        self.install()

    def _stepped_group(self, index: int) -> SteppedGroup:
        stepped = [
            (fragment, segment)
            for bucket in self.exchange.buckets
            for segment, shard in self._stepped(bucket)
            if segment.group == index
            for fragment in shard
        ]
        rule, num_ranks = self.settings.lr_by_coverage, len(self.model.plan.subnetwork_of_rank)
        whole = {info.name: info.shape for info in self.model.tensors if info.group == index and info.is_whole}
        return SteppedGroup(
            [fragment for fragment, _ in stepped],
            self.model.views,
            self._host,
            factors={fragment.piece: rate_factor(rule, len(s.holders) / num_ranks) for fragment, s in stepped},
            shapes=whole or None,
        )

    def _stepped(self, bucket: Bucket) -> list[tuple[Segment, list[Fragment]]]:
        if self.settings.stage:
            return self.exchange.owned(bucket)
        rank = self._dp_group.rank
        return [(segment, list(segment.fragments)) for segment in bucket.segments if segment.held_by(rank)]

    def begin_backward(self) -> None:
        """Every data-parallel rank calls it before each backward pass."""
        self._averaging.begin_backward()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Begins a backward pass, and notices if it fails."""
        self.begin_backward()
        try:
            yield
        except BaseException:
            self._averaging.fail_backward()
            raise

    def end_backward(self) -> None:
        """Every data-parallel rank calls it after each backward pass."""
        self._averaging.end_backward()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Average, clip, step, send back; a collective of the data-parallel group.

        Raises:
            ValueError: a closure is given, which would need a forward pass of all ranks.
        """
        if closure is not None:
            raise ValueError("SubnetworkOptimizer.step() takes no closure; call engine.backward(loss) before it")
        self._refuse_thawed()
        frozen = self._frozen_since_start()
        averages = self._averaging.collect()
        scaled_norm, scale = None if averages.squares is None else math.sqrt(averages.squares), self.loss_scale
        self.overflow = self.settings.skip_overflow and not math.isfinite(scaled_norm or 0.0)
        self.loss_scaler.update_scale(self.overflow)
        norm = None if scaled_norm is None else math.inf if self.overflow else scaled_norm / scale
        self._global_grad_norm = norm if self.settings.needs_norm else None
        if not self.overflow:
            self._take_step(averages, self._divisor(norm, scale), frozen)
        self.zero_grad()

    def _refuse_thawed(self) -> None:
        """RuntimeError if a parameter requires gradients that the layout has no room for."""
        thawed = [name for name, parameter in self._frozen_at_start.items() if parameter.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{quoted(thawed)} did not require gradients when deepspeed.initialize was called, so nobody would "
                "train them: set requires_grad before it, and freeze them after"
            )

    def _frozen_since_start(self) -> frozenset[str]:
        """At stage 0 those without a gradient are not stepped, as in DeepSpeed: not even decayed."""
        if self.settings.stage:
            return frozenset()
        return frozenset(
            name
            for name, parameter in self._parameters.items()
            if not parameter.requires_grad and not self._gradients.exists(name)
        )

    def _divisor(self, norm: float | None, scale: float) -> float:
        """Of the averages: the loss scale, and where they are clipped DeepSpeed's max(1, (norm + 1e-6) / clip)."""
        if self.settings.clip > 0:
            assert norm is not None
            scale *= max(1.0, (norm + 1e-6) / self.settings.clip)
        return scale

    def _take_step(self, averages: Averages, divisor: float, frozen: frozenset[str]) -> None:
        for index, group in enumerate(self.groups):
            group.link()
            if averages.flats is None:
                group.set_gradients(self._gradients, frozen)
                unscale([tensor.grad for tensor in group.tensors if tensor.grad is not None], divisor)
            else:
                unscale(averages.flats[index], divisor)
                group.set_flat_gradient(*averages.flats[index])
                averages.flats[index].clear()  # on a GPU what was copied to the host may go
        if self._host is not None:
            self._host.wait()
        with rates_by_coverage(self.optimizer, self.groups) as parts:
            self.optimizer.step()
            if not self._is_state_known:
                self._is_state_known = True
                check_state(self.optimizer, self.groups, self._dp_group)
                check_parts(self.optimizer, parts, self._dp_group)
        for group in self.groups:
            group.write_back()
        self._send_weights()

    def _send_weights(self) -> None:
        if self.settings.stage:
            receivers: Receivers = "all" if self._all_receive_weights else "holders"
        elif self._all_receive_weights:
            receivers = "others"
        else:
            return
        pipeline = Pipeline(self.settings.max_in_flight, self.weight_exchange.buffers.streams)
        for bucket in self.weight_exchange.buckets:
            pipeline.add(self.weight_exchange.distribute(bucket, self.model.views, receivers=receivers))
        pipeline.join()

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Gradients that exist now, for measurements."""
        return self._gradients.tensors() + self._averaging.tensors()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step, averages too, and those of a backward pass that failed half-way. At
        stage 2 all data-parallel ranks call it together."""
        for name in self._parameters:
            self._gradients.free(name)
        self._averaging.drop()

    def refresh_fp32_params(self) -> None:
        """Take fp32 masters from the weights where those are no more the rounded masters: they came from outside."""
        for group in self.groups:
            group.reload_master()
