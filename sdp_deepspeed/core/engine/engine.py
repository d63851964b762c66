"""SubnetworkEngine: DeepSpeed's engine with each rank's module cut down to its subnetwork.

DeepSpeed's constructor casts the module, moves it and makes it equal on all ranks. Then the plan is made and the mask
applied (`_configure_distributed_model`); then the optimizer is built, of the parameters as the user gave them, and
handed to the sharded optimizer (`_configure_zero_optimizer`).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.utils import log_dist, logger
from torch import nn

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.core.dense import DenseView
from sdp_deepspeed.core.engine.optimizer import SubnetworkOptimizer
from sdp_deepspeed.core.engine.settings import loss_scaler, sharded_options, skips_overflow
from sdp_deepspeed.core.masking.mask import Mask
from sdp_deepspeed.core.parallel.agree import Meetings, gather_objects, run_on_all_ranks
from sdp_deepspeed.core.parallel.groups import Groups
from sdp_deepspeed.core.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model

_numbers = itertools.count()  # of engines: all ranks build them together, so that all count them alike


class SubnetworkEngine(DeepSpeedEngine):
    """What `deepspeed.initialize` returns for a config with the block `subnetwork_data_parallel`.

    Attributes:
        block: the parsed block.
        plan: who holds what, the same on every rank.
        coverage: C of the plan, units weighted by their FLOPs.
        mask: this rank's subnetwork.
        groups: process groups.
        phase: of the schedule.
    """

    block: SubnetworkConfig
    plan: Plan
    coverage: float
    mask: Mask
    groups: Groups
    optimizer: SubnetworkOptimizer
    phase = 0

    def __init__(self, args: Any, model: nn.Module, *rest: Any, **options: Any) -> None:
        """
        Args:
            args, model, rest, options: of DeepSpeed's engine; `block` is set before (hook.py).
        """
        self._control = dist.new_group(backend="gloo") if dist.is_initialized() else None
        parameters = options.get("model_parameters")
        if parameters is not None:  # a filter by `requires_grad` is read before the mask freezes what this rank lacks
            options["model_parameters"] = [_with_list(group) for group in parameters]
        super().__init__(args, model, *rest, **options)

    # ---- construction -------------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        group = self.seq_data_parallel_group
        members = dist.get_process_group_ranks(group)
        every = sorted({tuple(ranks) for ranks in gather_objects(members, self._control)})

        def plan_and_mask() -> None:
            self.plan, warnings = plan_model(self.module, self.block, len(members))
            self.mask = Mask(self.module, self.plan, members.index(dist.get_rank()))
            costs = unit_costs(self.module, self.plan.units)
            self.coverage = self.plan.mean_coverage([cost.flops for cost in costs])
            for warning in warnings:
                log_dist(f"{KEY}: {warning}", ranks=[0], level=logging.WARNING)
            if dist.get_rank() == 0:
                _announce(f"{KEY}\n{self.plan.table(costs)}")

        run_on_all_ranks(plan_and_mask, self._control)
        if len({*gather_objects(self.plan.hash, self._control)}) > 1:
            raise RuntimeError("ranks made different plans: give all ranks the same model, config and versions")
        holder_sets = {holders for pieces in self.mask.pieces.values() for _, holders in pieces}
        self.groups = Groups(holder_sets, ranks=every, control=self._control)
        self._meetings = Meetings(f"sdp_deepspeed/meetings/{next(_numbers)}")
        self.mask.apply()
        self.dense_view = DenseView(
            self.mask,
            self.groups,
            self.device,
            meet=self._meetings.meet,
            changed=lambda: self.optimizer.refresh_fp32_params(),
            is_scaled=self.block.dense_branch_scale == "coverage",
        )

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        """DeepSpeed's, of the parameters that required gradients before the mask froze what this rank lacks."""
        frozen = [n for n, p in self.mask.parameters.items() if self.mask.trainable[n] and not p.requires_grad]
        for name in frozen:
            self.mask.parameters[name].requires_grad_(True)
        try:
            return super()._configure_basic_optimizer(model_parameters)
        finally:
            for name in frozen:
                self.mask.parameters[name].requires_grad_(False)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str:
        return ZERO_OPTIMIZATION  # every stage and precision takes our optimizer

    def _configure_zero_optimizer(self, optimizer: Any) -> SubnetworkOptimizer:
        sharded = ShardedOptimizer(
            optimizer,
            self.mask,
            self.groups,
            self._param_groups(optimizer),
            regime="backward" if self.plan.regime == "backward" else "forward",
            **sharded_options(self),
        )
        return SubnetworkOptimizer(
            sharded,
            loss_scaler(self),
            skips_overflow=skips_overflow(self),
            reports_norm=bool(self.zero_compute_grad_norm()),
            process_group=self.seq_data_parallel_group,
        )

    def _param_groups(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Index of the param group of each parameter to be trained, by dense name; the same on all ranks."""
        names = {id(parameter): name for name, parameter in self.mask.parameters.items()}

        def find() -> dict[str, int]:
            index_of = {}
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        raise ValueError(
                            f"optimizer param group {index} has a parameter of shape {tuple(parameter.shape)} that the "
                            "model does not have; build the optimizer from this model's parameters"
                        )
                    index_of[names[id(parameter)]] = index
            trained = [name for name in self.mask.parameters if self.mask.trainable[name] and name in index_of]
            return {name: index_of[name] for name in trained}

        found = run_on_all_ranks(find, self._control)
        if any(other != found for other in gather_objects(found, self._control)):
            raise RuntimeError("ranks have different param groups: give all ranks the same optimizer and requires_grad")
        return found

    # ---- training -----------------------------------------------------------------------------------------------

    def _backward_prologue(self) -> None:
        self.optimizer.sharded.is_last_micro_step = self.is_gradient_accumulation_boundary()
        super()._backward_prologue()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """After a backward pass; called by DeepSpeed's engine."""
        self.optimizer.sharded.finish_backward()

    def clip_fp32_gradients(self) -> None:
        """Nothing: the optimizer clips by the norm of the averaged dense gradient."""

    def backward(self, loss: torch.Tensor, *options: Any, **more: Any) -> Any:
        """As DeepSpeed's."""
        self._refuse_dense("backward")
        if self.optimizer.sharded.stage == 2:
            self._meetings.passing()
        return super().backward(loss, *options, **more)

    def zero_grad(self) -> None:
        """As DeepSpeed's; at stage 2 all ranks call it together, since averages are spread over them."""
        super().zero_grad()
        self.optimizer.zero_grad()

    def step(self, lr_kwargs: Any = None) -> None:
        """As DeepSpeed's; at the boundary a collective of all ranks."""
        self._refuse_dense("step")
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            self._meetings.passing()
        super().step(lr_kwargs)

    # ---- the dense model ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As DeepSpeed's; going back to training ends an evaluation of the dense model."""
        if mode and "dense_view" in vars(self):
            self.dense_view.end_evaluation()
        super().train(mode)
        return self

    @contextmanager
    def dense(self, *, resident: bool | None = None) -> Iterator[None]:
        """Context in which `module` is the dense model; all ranks enter and leave together. The next step starts from
        the weights as they are left. For gradients of the dense model use `torch.autograd.grad`."""
        with self.dense_view.resident():
            yield

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Write the dense model as the module's own `save_pretrained` does; all ranks call it, rank 0 writes."""

        def write() -> None:
            if dist.get_rank() == 0:
                self.module.save_pretrained(str(folder), **options)
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(folder))

        with self.dense_view.resident("save_pretrained"):
            run_on_all_ranks(write, self._control)

    def _refuse_dense(self, call: str) -> None:
        self.dense_view.end_evaluation()
        if self.dense_view.is_resident:
            raise RuntimeError(f"{call} inside engine.dense(): leave it first, on all ranks")

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores for its subnetwork, by dense name."""
        tensors: dict[str, torch.Tensor] = {**self.mask.parameters, **self.mask.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


def _with_list(group: Any) -> Any:
    """A param group whose parameters may be read again; a parameter as it is."""
    if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
        return {**group, "params": list(group["params"])}
    return group


def _announce(text: str) -> None:
    """Print what a user should see once, though DeepSpeed's own level is warnings by default, and the Trainer's too. A
    level above that, which somebody must have asked for, quiets this as well."""
    own = logger.getChild("sdp_deepspeed")
    if not own.handlers:
        own.propagate = False
        own.addHandler(logging.StreamHandler(sys.stdout))
    own.setLevel(logging.INFO if logger.level <= logging.WARNING else logger.level)
    own.info(text)
