"""The order in which the method is applied to a live module: divide, plan, mask, materialize, dense view.

Read this first to see what happens to a model; each step is in a room of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from deepspeed.utils import log_dist, logger
from torch import nn

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, Evaluation, SubnetworkConfig
from sdp_deepspeed.deferred_init.materialize import DeferredModel, check_initialized_alike, refuse_tensor_parallel
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator, RankGroups
from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier, make_monitored_barrier
from sdp_deepspeed.engine.batch_norm_dtypes import check_batch_norm_dtypes
from sdp_deepspeed.engine.consistency import check_holders_agree, check_same_plan
from sdp_deepspeed.engine.holder_groups import make_holder_groups, refuse_divided
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.batch_norm import RunningStatistics
from sdp_deepspeed.masking.dense_view import DenseView
from sdp_deepspeed.masking.description_check import check_descriptions
from sdp_deepspeed.masking.freed_memory import give_back
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.passes import DensePasses, HeldUnits
from sdp_deepspeed.masking.synchronized import Holders, synchronize, synchronized_over
from sdp_deepspeed.masking.tried import Tried, own_layers
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors, named_tensors
from sdp_deepspeed.tensor_parallel.checks import check_groups
from sdp_deepspeed.tensor_parallel.model import ModelBeforeAutoTP, TensorParallel, build_tensor_parallel
from sdp_deepspeed.units import UnitCost


@dataclass(frozen=True)
class ModelAtStart:
    """A module that DeepSpeed has cast, moved and made equal on all data-parallel ranks.

    Args:
        module: on `device`, or without storage yet (`deferred`).
        device: where the weights belong.
        stage: ZeRO's.
        nodes: of the ranks; a function because gathering them is a collective.
        before_autotp: what AutoTP's division has left no trace of; None if AutoTP did not divide the module.
        deferred: what makes the weights of a module without storage; None if they are there.
    """

    module: nn.Module
    device: torch.device
    stage: int
    nodes: Callable[[], tuple[Hashable, ...]]
    before_autotp: ModelBeforeAutoTP | None = None
    deferred: DeferredModel | None = None


@dataclass(frozen=True)
class AppliedPlan:
    """A module that is this rank's subnetwork, and what makes it the dense model again.

    Args:
        plan: in the dense model's coordinates, the same on every rank.
        parallel: this rank's part in a tensor-parallel group.
        mask: applied to the module.
        dense_view: installed in the module.
        barrier: where all ranks agree before each collective of the dense view.
        tried: which descriptions of users were tried out.
        coverage: C, units weighted by their FLOPs.
    """

    plan: Plan
    parallel: TensorParallel
    mask: Mask
    dense_view: DenseView
    barrier: MonitoredBarrier
    tried: Tried
    coverage: float

    @property
    def statistics(self) -> RunningStatistics:
        """Of the module's batch norms."""
        return self.dense_view.statistics

    @property
    def model(self) -> RankModel:
        """The plan in this rank's coordinates, and where its pieces lie."""
        return self.mask.model

    @property
    def with_statistics(self) -> RankModel:
        """As `model`, with the running statistics of batch norms: all that ranks with the same units have the same."""
        return replace(self.model, tensors=(*self.model.tensors, *self.statistics.tensors))


@dataclass(frozen=True)
class ChosenPlan:
    """A plan of a whole module, and what is known of it while the module is whole.

    Args:
        plan: in the dense model's coordinates.
        nodes: of the ranks.
        costs: of its units on this rank.
        warnings: for the user.
    """

    plan: Plan
    nodes: tuple[Hashable, ...]
    costs: Sequence[UnitCost]
    warnings: Sequence[str]

    @property
    def coverage(self) -> float:
        """C, units weighted by their FLOPs."""
        return self.plan.mean_coverage([cost.flops for cost in self.costs])

    @classmethod
    def of(
        cls,
        module: nn.Module,
        block: SubnetworkConfig,
        nodes: tuple[Hashable, ...],
        parallel: TensorParallel,
        num_ranks: int,
    ) -> ChosenPlan:
        """
        Args:
            num_ranks: data-parallel ones.

        Raises:
            ValueError: a block that does not fit the model or the number of ranks.
        """
        plan, warnings = plan_model(module, block, num_ranks, branches=parallel.branches, shards=parallel.shards)
        return cls(plan, nodes, unit_costs(module, parallel.shards.local_plan(plan).units), warnings)

    def rank_model(
        self, module: nn.Module, tensors: Sequence[TensorInfo], parallel: TensorParallel, rank: int
    ) -> RankModel:
        """The plan in this rank's coordinates.

        Args:
            module: whole.
            tensors: its parameters.
        """
        return RankModel(
            plan=parallel.shards.local_plan(self.plan),
            tensors=tuple(tensors),
            views=PieceViews(named_tensors(module)),
            rank=rank,
            shards=parallel.shards,
            on_nodes=Nodes.of(self.nodes),
        )


def apply_plan(
    start: ModelAtStart, block: SubnetworkConfig, groups: RankGroups, later: Sequence[SubnetworkConfig] = ()
) -> AppliedPlan:
    """Make a module this rank's subnetwork; every rank calls it.

    Args:
        later: blocks of later phases, for which descriptions of users are tried out too, now that the module is whole.

    Raises:
        ValueError, RuntimeError: on all ranks: what one of them cannot divide, plan or mask, or what is not the same on
            all of them.
    """
    module, nodes = start.module, start.nodes()

    def divide_plan_and_mask() -> tuple[TensorParallel, ChosenPlan, Mask, Tried, dict[str, Holders]]:
        check_groups(groups)
        check_batch_norm_dtypes(module)
        if groups.tp_group is not None:
            refuse_tensor_parallel(start.deferred)
        # Divide: which part of each tensor a rank of the tensor-parallel group stores.
        tensors = dense_tensors(module)
        parallel = build_tensor_parallel(module, groups.tp_group, start.before_autotp, stage=start.stage)
        # Plan: which units the model has, and which subnetwork holds which.
        chosen = ChosenPlan.of(module, block, nodes, parallel, groups.dp_group.size)
        model = chosen.rank_model(module, tensors, parallel, groups.dp_group.rank)
        branches = parallel.branches if groups.tp_group is None else []  # part of a layer cannot be tried out
        plans = [chosen.plan] if branches else []
        if own_layers(module, branches):
            later_plans = (ChosenPlan.of(module, each, nodes, parallel, groups.dp_group.size) for each in later)
            plans += [each.plan for each in later_plans]
        notes = [check_descriptions(module, branches, plan, start.device) for plan in plans]
        chosen = replace(chosen, warnings=[*chosen.warnings, *dict.fromkeys(chain.from_iterable(notes))])
        tried = Tried.of(module, branches, plans)
        # Mask: drop, narrow or freeze what this rank lacks.
        mask = Mask(module, model, parallel.branches, scales=block.dense_branch_scale == "coverage")
        synchronized = synchronized_over(module, model, parallel.branches, stage=start.stage)
        refuse_divided(synchronized, groups.tp_group)
        mask.apply()
        return parallel, chosen, mask, tried, synchronized

    parallel, chosen, mask, tried, synchronized = run_on_all_ranks(groups.world, divide_plan_and_mask)
    check_same_plan(chosen.plan, groups.world)
    synchronize(module, synchronized, make_holder_groups(synchronized.values(), groups.world.rank))
    # Materialize: a module without storage gets the weights that are left of it.
    if start.deferred is not None:
        start.deferred.materialize(mask, start.device, groups.world)
        check_initialized_alike(lambda: check_holders_agree(mask.model, groups.dp_group))
        if start.deferred.note:
            log_dist(f"{KEY}: {start.deferred.note}", ranks=[0])
    give_back(start.device)  # before the optimizer allocates
    # Dense view: what makes the module the dense model again, for evaluation, export and state dicts.
    barrier = make_monitored_barrier(groups.host, groups.last_acts, logger.warning)
    dense_view = install_dense_view(module, mask, groups.dp_group, barrier, (start.device, block.evaluation))
    tell(chosen, groups.world.rank)
    return AppliedPlan(chosen.plan, parallel, mask, dense_view, barrier, tried, chosen.coverage)


def install_dense_view(
    module: nn.Module,
    mask: Mask,
    dp_group: Communicator,
    barrier: MonitoredBarrier,
    options: tuple[torch.device, Evaluation],
) -> DenseView:
    """
    Args:
        module: `mask` was applied to it.
        options: its device, and how parts come to be there.
    """
    device, evaluation = options
    fetcher = HeldUnits(mask, dp_group, device=device)
    statistics = RunningStatistics(module, mask.model, dp_group, device=device)
    passes = DensePasses(mask, fetcher, barrier, device=device, report=log_in_block, statistics=statistics)
    dense_view = DenseView(module, mask, dp_group, barrier, passes, evaluation=evaluation)
    dense_view.install()
    return dense_view


def tell(chosen: ChosenPlan, rank: int, *, table: bool = True, rows: bool = True) -> None:
    """Warnings, and on rank 0 the plan, if it has to be told, with a row for each unit or without."""
    for warning in chosen.warnings:
        log_dist(f"{KEY}: {warning}", ranks=[0], level=logging.WARNING)
    if table and rank == 0:  # the others would make a table that nobody prints
        announce(f"{KEY}\n{chosen.plan.table(chosen.costs, rows=rows)}{_losses(chosen.plan)}")


def announce(text: str) -> None:
    """Print what a user should see once, though DeepSpeed's own level is warnings by default, and the Trainer's too. A
    level above that, which somebody must have asked for, quiets this as well."""
    own = logger.getChild("sdp_deepspeed")
    if not own.handlers:
        own.propagate = False
        own.addHandler(logging.StreamHandler(sys.stdout))
    own.setLevel(logging.INFO if logger.level <= logging.WARNING else logger.level)
    own.info(text)


def _losses(plan: Plan) -> str:
    text = "\n  a loss in training mode is a subnetwork's; in evaluation mode without gradients it is the dense model's"
    return text if plan.trains_subnetworks else ""


def log_in_block(text: str) -> None:
    """In DeepSpeed's log, on rank 0."""
    log_dist(f"{KEY}: {text}", ranks=[0])
