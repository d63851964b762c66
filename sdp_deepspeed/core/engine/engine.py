"""SubnetworkEngine: DeepSpeed's engine with each rank's module cut down to its subnetwork.

DeepSpeed's constructor casts the module, moves it and makes it equal on all ranks. Then the plan is made
(`_configure_distributed_model`). Then DeepSpeed or the user builds the optimizer, of the whole model, so that all ranks
have the same param groups; only then the mask is applied, and the sharded optimizer takes over
(`_configure_zero_optimizer`).
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.utils import log_dist, logger
from torch import nn

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.core.dense import DenseView
from sdp_deepspeed.core.engine.optimizer import SubnetworkOptimizer
from sdp_deepspeed.core.engine.refusals import refuse_config, refuse_model
from sdp_deepspeed.core.engine.settings import loss_scaler, sharded_options, skips_overflow
from sdp_deepspeed.core.masking.compiled import compile_in_place
from sdp_deepspeed.core.masking.mask import Mask
from sdp_deepspeed.core.masking.replaced import KnownParameters
from sdp_deepspeed.core.parallel.agree import Meetings, check_agreement, gather_objects, run_on_all_ranks
from sdp_deepspeed.core.parallel.groups import Groups
from sdp_deepspeed.core.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.core.parallel.optimizer_kinds import check_optimizer
from sdp_deepspeed.core.parallel.param_groups import param_group_indices
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

        def prepare() -> nn.Module:
            _make_whole(model)
            refuse_config(self.block, options["config"], options["config_class"])
            refuse_model(model)
            return compile_in_place(model)

        model = run_on_all_ranks(prepare, self._control)
        super().__init__(args, model, *rest, **options)
        if self.optimizer is None:
            raise ValueError(f"{KEY} needs an optimizer: name one in the config, or give deepspeed.initialize one")
        _engines[model] = weakref.ref(self)

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
        hashes = gather_objects(self.plan.hash, self._control)
        if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            raise RuntimeError(
                f"rank {other[0]} made another plan than rank 0; give all ranks the same model, config and versions"
            )
        holder_sets = {holders for pieces in self.mask.pieces.values() for _, holders in pieces}
        self.groups = Groups(holder_sets, ranks=every, control=self._control)
        self._meetings = Meetings(f"sdp_deepspeed/meetings/{next(_numbers)}")

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """As DeepSpeed's; an error of one rank is raised on all."""
        if client_optimizer is not None and not isinstance(client_optimizer, torch.optim.Optimizer):
            parameters = list(self.module.parameters()) if model_parameters is None else list(model_parameters)
            built = run_on_all_ranks(lambda: client_optimizer(parameters), self._control)
            client_optimizer = lambda _: built  # noqa: E731 (DeepSpeed asks whether it is a function)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str:
        return ZERO_OPTIMIZATION  # every stage and precision takes our optimizer

    def _configure_zero_optimizer(self, optimizer: Any) -> SubnetworkOptimizer:
        param_groups = self._param_groups(optimizer)
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        frozen = [name for name, p in self.mask.parameters.items() if id(p) in given and not self.mask.trainable[name]]
        self._known_parameters = KnownParameters(self.module, self.mask.parameters, frozen)
        self.mask.apply()
        self.dense_view = DenseView(
            self.mask,
            self.groups,
            self.device,
            meet=self._meetings.meet,
            changed=lambda: self.optimizer.refresh_fp32_params(),
            is_scaled=self.block.dense_branch_scale == "coverage",
        )
        sharded = ShardedOptimizer(
            optimizer,
            self.mask,
            self.groups,
            param_groups,
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

        def find() -> dict[str, int]:
            allow = self.block.allow_optimizer or self.zero_allow_untested_optimizer()
            check_optimizer(type(optimizer), allow=bool(allow))
            return param_group_indices(optimizer, self.mask.parameters, self.mask.trainable)

        found = run_on_all_ranks(find, self._control)
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        facts = [f"{type(optimizer).__name__} {options}", *(f"{item}" for item in found.items())]
        _refuse_difference("param groups", gather_objects(facts, self._control))
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
            self._known_parameters.check()
        super().step(lr_kwargs)
        if self.block.check_agreement and self._step_applied:
            run_on_all_ranks(lambda: check_agreement(self.mask, self.groups), self._control)

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

    def release(self) -> None:
        """Give the dense model back, for another engine; this one trains no more. Every rank calls it."""
        self.dense_view.make_resident("deepspeed.initialize")
        self.dense_view.close()
        self.optimizer.destroy()

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores for its subnetwork, by dense name."""
        tensors: dict[str, torch.Tensor] = {**self.mask.parameters, **self.mask.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


_engines: WeakKeyDictionary[nn.Module, weakref.ref[SubnetworkEngine]] = WeakKeyDictionary()  # by their module


def _make_whole(model: nn.Module) -> None:
    """A model that an earlier engine cut is dense again, and the earlier engine is at its end.

    Raises:
        ValueError: a copy, or a part, of such a model.
    """
    earlier = _engines.pop(model, lambda: None)()
    if earlier is not None:
        earlier.release()
    refuse_cut(model)


def refuse_cut(model: nn.Module) -> None:
    """ValueError for a model of which an engine of ours has made a subnetwork."""
    if any("_sdp_masked" in vars(module) for module in model.modules()):
        raise ValueError(
            f"{KEY}: an earlier engine cut this model down to subnetworks: build the model anew, or copy it with "
            "copy.deepcopy inside `with engine.dense():`"
        )


def _refuse_difference(what: str, facts: Sequence[Sequence[str]]) -> None:
    """RuntimeError with the first fact on which a rank differs from rank 0."""
    for rank, own in enumerate(facts):
        pairs = itertools.zip_longest(facts[0], own, fillvalue="nothing")
        if differing := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise RuntimeError(
                f"rank {rank} has other {what} than rank 0: {differing[1]} there, {differing[0]} on rank 0. Give all "
                "ranks the same model, optimizer and requires_grad"
            )


def _announce(text: str) -> None:
    """Print what a user should see once, though DeepSpeed's own level is warnings by default, and the Trainer's too. A
    level above that, which somebody must have asked for, quiets this as well."""
    own = logger.getChild("sdp_deepspeed")
    if not own.handlers:
        own.propagate = False
        own.addHandler(logging.StreamHandler(sys.stdout))
    own.setLevel(logging.INFO if logger.level <= logging.WARNING else logger.level)
    own.info(text)
