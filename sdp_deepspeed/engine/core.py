"""A model under a plan, on this rank. DeepSpeed's engine (engine.py) is around it; plans.py changes its plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm  # so that its comms logger records averages and gathered weights
from deepspeed.utils import logger
from torch import nn

from sdp_deepspeed import planner
from sdp_deepspeed.checkpoint.rank_state import RankState
from sdp_deepspeed.checkpoint.save_and_load import Checkpointer
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.dense_view import DenseView
from sdp_deepspeed.engine.tensor_parallel import TensorParallel
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.replaced import KnownParameters
from sdp_deepspeed.masking.scale import describe_scale
from sdp_deepspeed.messages import announce
from sdp_deepspeed.parallel.call_barrier import CallBarrier
from sdp_deepspeed.parallel.consistency import (
    check_agreement,
    check_same_plan,
    gather_objects,
    run_on_all_ranks,
)
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer, tensors_stepped_whole
from sdp_deepspeed.parallel.param_groups import agreed_param_groups
from sdp_deepspeed.parallel.step_options import StepOptions
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs


class Core:
    """The model of an engine under a plan. The constructor computes the first one; `start` applies it.

    Args:
        module: dense, on `device`.
        data_parallel: ranks of the data-parallel group of each tensor-parallel rank.
        control: gloo group of all ranks.
        deferred: weights of a model built under `Init`; None if the module has them.

    Attributes:
        barrier: for calls that all ranks must make.
    """

    coverage: float
    groups: Groups
    sharded: ShardedOptimizer
    dense_view: DenseView
    checkpoints: Checkpointer
    known_parameters: KnownParameters

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        block: SubnetworkConfig,
        tensor_parallel: TensorParallel,
        data_parallel: Sequence[tuple[int, ...]],
        control: dist.ProcessGroup,
        deferred: DeferredWeights | None,
    ) -> None:
        self.module, self.device, self.block, self.control, self.barrier = module, device, block, control, CallBarrier()
        self.tensor_parallel, self._data_parallel, self._deferred = tensor_parallel, data_parallel, deferred
        self._torch_optimizer: torch.optim.Optimizer | None = None  # of the dense model's parameters
        self.plan, self.mask = self.plan_and_mask(block)
        if self.mask.scaled and dist.get_rank() == 0:
            announce(describe_scale(module, self.mask.branches, self.mask.scaled, by_init=deferred is not None), logger)

    def plan_and_mask(self, block: SubnetworkConfig, *, logs: bool = True) -> tuple[Plan, Mask]:
        """Compute the plan of a block and this rank's mask, without applying it. Collective; the module must be dense.

        Raises:
            ValueError: on all ranks, if the block does not fit the model or the number of ranks.
        """
        me = dist.get_rank()
        members = next(ranks for ranks in self._data_parallel if me in ranks)
        branches, shards = self.tensor_parallel.branches, self.tensor_parallel.shards

        def make() -> tuple[Plan, Mask]:
            plan, mask, warnings = planner.plan_and_mask(
                self.module, block, len(members), members.index(me), branches, shards
            )
            if self._torch_optimizer is not None:
                tensors_stepped_whole(
                    self._torch_optimizer,
                    self._param_group_of,
                    mask,
                    tp_replicated=self.tensor_parallel.tp_replicated(mask.parameters),
                    is_divided=shards.size > 1,
                )
            if logs and me == 0:
                planner.announce_plan(self.module, plan, mask, warnings, logger)
            return plan, mask

        plan, mask = run_on_all_ranks(make, self.control)
        check_same_plan(plan, self.control)
        return plan, mask

    def take_optimizer(self, optimizer: torch.optim.Optimizer, *, frozen: Collection[str], allow: bool) -> None:
        """Check the optimizer of the dense model's parameters. Collective, before `start`.

        Args:
            frozen: see `agreed_param_groups`.
            allow: see `check_optimizer`.
        """
        mask, given = self.mask, {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        never_trained = [name for name, p in mask.parameters.items() if id(p) in given and not mask.trainable[name]]
        self.known_parameters = KnownParameters(self.module, mask.parameters, never_trained)
        run_on_all_ranks(lambda: check_optimizer(type(optimizer), allow=allow), self.control)
        self._param_group_of = agreed_param_groups(optimizer, mask, frozen, self.control)
        self._torch_optimizer = optimizer

    def start(self, options: StepOptions) -> None:
        """Reduce the module to this rank's subnetwork, and make the optimizer step this rank's shards. Collective."""
        self.apply(self.block, self.plan, self.mask, options)
        self.checkpoints = Checkpointer(self.block.checkpoint)

    def apply(self, block: SubnetworkConfig, plan: Plan, mask: Mask, options: StepOptions) -> None:
        """Do so under a plan from `plan_and_mask`. Collective, with a dense module."""
        assert self._torch_optimizer is not None
        self.block, self.plan, self.mask = block, plan, mask
        self.coverage = mask.plan.coverage_by_flops(unit_costs(self.module, mask.plan.units))
        holder_sets = {holders for pieces in mask.pieces.values() for _, holders in pieces}
        self.groups = Groups(holder_sets, ranks=self._data_parallel, control=self.control, comm=deepspeed_comm)
        mask.apply()
        if (deferred := self._deferred) is not None:
            seed = gather_objects(deferred.seed, self.control)[0]
            run_on_all_ranks(lambda: deferred.materialize(mask, self.device, seed), self.control)
            self._deferred = None
        self._partial_sums = self.tensor_parallel.sum_partial_gradients(mask.parameters)
        self.sharded = ShardedOptimizer(
            self._torch_optimizer,
            mask,
            self.groups,
            self._param_group_of,
            options,
            tp_replicated=self.tensor_parallel.tp_replicated(mask.parameters),
        )
        self.dense_view = DenseView(self.sharded, self.barrier, self.device)

    def state(self) -> RankState:
        """This rank's share of the model and optimizer state."""
        return RankState(self.mask, self.sharded, self.groups, self.tensor_parallel.shards)

    def check_parameters(self) -> None:
        """Raise RuntimeError if a Parameter, or outside the dense view its `.data`, was replaced."""
        self.known_parameters.check()
        self.mask.check_shapes()

    def check_agreement(self) -> None:
        """Compare weights with the other holders and the tensor-parallel ranks; collective. See `check_agreement`."""
        run_on_all_ranks(lambda: check_agreement(self.mask, self.groups), self.control)
        held = self.held_tensors()
        run_on_all_ranks(lambda: self.tensor_parallel.check_tp_replicated(held, self.control), self.control)

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores, by dense name."""
        tensors: dict[str, torch.Tensor] = {**self.mask.parameters, **self.mask.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}

    def require_subnetwork(self, call: str) -> None:
        """End an evaluation, after which the module is this rank's subnetwork. Raise RuntimeError inside `dense`."""
        self.dense_view.end_evaluation()
        if self.dense_view.is_resident:
            raise RuntimeError(f"{call} inside engine.dense(): leave the context first, on all ranks")

    def close(self) -> None:
        """Leave the module dense, for another engine. Collective."""
        self.checkpoints.close()
        self.dense_view.make_resident("deepspeed.initialize")
        self.close_plan()
        dist.destroy_process_group(self.control)

    def close_plan(self) -> None:
        """End the plan. The module stays dense, as the dense view has made it."""
        self.dense_view.close()
        self.sharded.close()
        self.groups.close()
        for handle in self._partial_sums:
            handle.remove()
