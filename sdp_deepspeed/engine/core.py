"""A plan in force on this rank, and the change to another one. DeepSpeed's engine (engine.py) is around it.

Re-planning continues a live run under another plan, as if a checkpoint were saved and loaded, but in memory. All checks
run before anything is changed. During the exchange, each rank has the dense weights in the run's precision. The user's
optimizer, param groups and Parameters stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm  # so that its comms logger records averages and gathered weights
from deepspeed.utils import logger
from torch import nn

from sdp_deepspeed import planner
from sdp_deepspeed.checkpoint.rank_state import RankState
from sdp_deepspeed.checkpoint.save_and_load import Checkpointer
from sdp_deepspeed.checkpoint.state_transfer import collect_state, load_state
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.dense_view import DenseView
from sdp_deepspeed.engine.tensor_parallel import TensorParallel
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.replaced import KnownParameters
from sdp_deepspeed.masking.scale import describe_scale
from sdp_deepspeed.messages import announce, quoted
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


@dataclass(frozen=True)
class Replanned:
    """Cost of a re-plan.

    Args:
        sent_bytes: maximum over ranks of the bytes sent, without the dense weights.
        seconds: maximum over ranks of the time taken.
    """

    sent_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"re-planned in {self.seconds:.3g} s; a rank sent up to {self.sent_bytes:,} bytes of optimizer state"


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
        self._apply(self.block, self.plan, self.mask, options)
        self.checkpoints = Checkpointer(self.block.checkpoint)

    def _apply(self, block: SubnetworkConfig, plan: Plan, mask: Mask, options: StepOptions) -> None:
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

    def replan(self, block: SubnetworkConfig, options: StepOptions, *, logs: bool = True) -> Replanned:
        """Continue under the plan of another block, with other options of the step. Collective, between two
        steps.

        Raises:
            ValueError, RuntimeError: on all ranks. All checks run before anything is changed.
        """
        begin = time.monotonic()
        self.checkpoints.wait()
        self.dense_view.make_resident("engine.replan")
        try:
            plan, mask = self.plan_and_mask(block, logs=logs)
        except Exception:
            self.dense_view.end()
            raise

        def change() -> None:
            self._close_plan()
            self.sharded.optimizer.state.clear()
            self._apply(block, plan, mask, options)
            # A backward pass through a graph of the earlier plan would be silently incomplete: let autograd refuse it.
            torch.autograd.graph.increment_version(list(mask.parameters.values()))

        with torch.no_grad():
            snapshot = collect_state(self.state())
            run_on_all_ranks(change, self.control)
            sent = load_state(snapshot, self.state(), self.device)
        del snapshot
        costs = gather_objects((sent, time.monotonic() - begin), self.control)
        return Replanned(*map(max, zip(*costs, strict=True)))

    def refuse_replan(self) -> None:
        """Raise ValueError or RuntimeError if the state of the run does not allow re-planning."""
        self.require_subnetwork("engine.replan")
        self.known_parameters.check()
        self.sharded.refuse_unfinished("engine.replan")
        mask = self.mask
        frozen = [n for n, p in mask.parameters.items() if mask.trainable[n] and p.numel() and not p.requires_grad]
        if frozen := [name for name in frozen if mask.held_pieces(name)]:
            raise ValueError(
                f"engine.replan: {quoted(frozen)} required gradients at deepspeed.initialize but not now; undo that, "
                "or load a checkpoint in a new engine"
            )

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
        self._close_plan()
        dist.destroy_process_group(self.control)

    def _close_plan(self) -> None:
        self.dense_view.close()
        self.sharded.close()
        self.groups.close()
        for handle in self._partial_sums:
            handle.remove()
