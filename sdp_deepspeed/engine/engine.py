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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm  # its comms logger sees our collectives
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.utils import log_dist, logger
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import nn

from sdp_deepspeed.architectures import locate_branches, unit_costs
from sdp_deepspeed.batch_norm import batches_of
from sdp_deepspeed.checkpoint.hugging_face import load_pretrained
from sdp_deepspeed.checkpoint.manager import CheckpointManager
from sdp_deepspeed.checkpoint.random_state import unchanged_random_state
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.dense import DenseView
from sdp_deepspeed.engine.checkpoints import load, new_manager, save
from sdp_deepspeed.engine.full_access import install_full_access
from sdp_deepspeed.engine.monitor import StepEvents
from sdp_deepspeed.engine.optimizer import SubnetworkOptimizer
from sdp_deepspeed.engine.refusals import refuse_config, refuse_model
from sdp_deepspeed.engine.replan import (
    Replanned,
    follow_schedule,
    new_config,
    rank_state,
    replan,
    try_schedule,
)
from sdp_deepspeed.engine.settings import loss_scaler, sharded_options, skips_overflow
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.masking.batch_norm import (
    average_running_statistics,
    estimate_statistics,
    tracking_norms,
    write_statistics,
)
from sdp_deepspeed.masking.compiled import compile_in_place
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.replaced import KnownParameters
from sdp_deepspeed.masking.scale import output_scales
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.agree import Meetings, check_agreement, gather_objects, run_on_all_ranks
from sdp_deepspeed.parallel.groups import CONTROL, Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer
from sdp_deepspeed.parallel.param_groups import param_group_indices
from sdp_deepspeed.parallel.tensor_parallel import TensorParallel, WholeModel, of_author, of_autotp
from sdp_deepspeed.parallel.whole_state_dicts import WholeStateDicts
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.schedule import Schedule

_numbers = itertools.count()  # of engines: all ranks build them together, so that all count them alike


class SubnetworkEngine(DeepSpeedEngine):
    """What `deepspeed.initialize` returns for a config with the block `subnetwork_data_parallel`.

    Attributes:
        block: the parsed block.
        plan: who holds what, the same on every rank.
        coverage: C of the plan, units weighted by their FLOPs.
        mask: this rank's subnetwork.
        groups: process groups.
        tensor_parallel: this rank's part in a tensor-parallel group.
        schedule: of plans; None if the plan does not change over time.
        phase, draw: of the schedule, that the engine is laid out for.
        stage_of_config: ZeRO's, that the run begins with.
    """

    block: SubnetworkConfig
    plan: Plan
    coverage: float
    mask: Mask
    groups: Groups
    tensor_parallel: TensorParallel
    checkpoints: CheckpointManager
    optimizer: SubnetworkOptimizer
    schedule: Schedule | None
    phase = draw = stage_of_config = 0
    _before_autotp: WholeModel | None = None
    _deferred: DeferredWeights | None = None  # of a model that was built under `Init`
    _state_dicts: WholeStateDicts | None = None  # under tensor parallelism

    def __init__(self, args: Any, model: nn.Module, *rest: Any, **options: Any) -> None:
        """
        Args:
            args, model, rest, options: of DeepSpeed's engine; `block` is set before (import_hook.py).
        """
        self._control = dist.new_group(backend="gloo", group_desc=CONTROL) if dist.is_initialized() else None

        def prepare() -> nn.Module:
            self._frozen_before = _make_whole(model)
            refuse_config(options["config"], options["config_class"])
            refuse_model(model)
            if options.get("mesh_device") is not None:
                raise ValueError(f"{KEY}: mesh_param asks for sequence parallelism, which is not possible; remove it")
            _check_mpu(options.get("mpu"))
            if DeferredWeights.are_in(model):
                self._deferred = DeferredWeights(model)
                options["dont_change_device"] = True
            return compile_in_place(model)

        model = run_on_all_ranks(prepare, self._control)
        super().__init__(args, model, *rest, **options)
        if self.optimizer is None:
            raise ValueError(f"{KEY} needs an optimizer: name one in the config, or give deepspeed.initialize one")
        _engines[model] = weakref.ref(self)
        self._step_events = StepEvents.of(self)
        self.checkpoints = new_manager(self)
        for name in self.optimizer.sharded.param_groups:
            install_full_access(self.mask.parameters[name], name, self)

    # ---- construction -------------------------------------------------------------------------------------------

    def _broadcast_model(self) -> None:
        if self._deferred is not None:
            return  # each rank makes the same weights
        for parameter in self.module.parameters():  # DeepSpeed cannot send channels-last ones; buckets are row-major
            if not parameter.is_contiguous() or (parameter.dim() and parameter.stride(-1) != 1):
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        super()._broadcast_model()

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        self.tensor_parallel = self._find_tensor_parallel()
        self.stage_of_config = int(self.zero_optimization_stage())
        self.refuse_stage(self.stage_of_config)
        self._meetings = Meetings(f"sdp_deepspeed/meetings/{next(_numbers)}")
        self.schedule = run_on_all_ranks(self._find_schedule, self._control)
        try_schedule(self)
        self.plan, self.mask = self.plan_and_mask(self.block)

    def refuse_stage(self, stage: int) -> None:
        """ValueError for one of ZeRO's stages under which ranks of a tensor-parallel group would have other buckets."""
        uneven = [name for name, division in self.tensor_parallel.shards.divisions.items() if not division.is_even]
        if uneven and stage == 2:
            raise ValueError(
                f"zero_optimization.stage: got 2, but tensor-parallel ranks do not divide {uneven[0]!r} evenly; pad "
                "the vocabulary (resize_token_embeddings), or use stage 1"
            )

    def _find_schedule(self) -> Schedule | None:
        schedule = Schedule.of(self.config, KEY)
        if schedule is not None:
            schedule.check_first(self.stage_of_config)
        return schedule

    def plan_and_mask(self, block: SubnetworkConfig, *, tells: bool = True) -> tuple[Plan, Mask]:
        """The plan of a block, and this rank's mask, not applied; every rank calls it while the module is dense.

        Args:
            tells: whether plan and warnings are logged.

        Raises:
            ValueError: on all ranks, what does not fit the model or the number of ranks.
        """
        branches, shards = self.tensor_parallel.branches, self.tensor_parallel.shards
        members = self._members()

        def make() -> tuple[Plan, Mask]:
            plan, warnings = plan_model(self.module, block, len(members), branches=branches, shards=shards)
            local = shards.local_plan(plan)
            mask = Mask(self.module, local, members.index(dist.get_rank()), branches=branches)
            if block.dense_branch_scale == "coverage":
                output_scales(mask)  # raises
            for warning in warnings if tells else ():
                log_dist(f"{KEY}: {warning}", ranks=[0], level=logging.WARNING)
            if tells and dist.get_rank() == 0:
                _announce(f"{KEY}\n{plan.table(unit_costs(self.module, local.units))}")
            return plan, mask

        plan, mask = run_on_all_ranks(make, self._control)
        hashes = gather_objects(plan.hash, self._control)
        if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            raise RuntimeError(
                f"rank {other[0]} made another plan than rank 0; give all ranks the same model, config and versions"
            )
        return plan, mask

    def _configure_tensor_parallel(self, model: nn.Module, tp_config: Any) -> Any:
        size = int(self.autotp_size())
        if dist.get_world_size() % size:
            raise ValueError(
                f"tensor_parallel.autotp_size: got {size}, which does not divide the {dist.get_world_size()} ranks"
            )
        if self._deferred is not None:
            raise ValueError("tensor_parallel divides weights that are there; build the model without Init")
        self._before_autotp = WholeModel.of(model)
        try:
            return super()._configure_tensor_parallel(model, tp_config)
        except AssertionError as error:
            raise ValueError(
                f"tensor_parallel.autotp_size: DeepSpeed's AutoTP cannot divide a {type(model).__name__}: {error}. Use "
                "a Llama, Mistral, Qwen2, Qwen3 or GPT-NeoX, or remove tensor_parallel"
            ) from error

    def _find_tensor_parallel(self) -> TensorParallel:
        """This rank's part in a tensor-parallel group, of AutoTP or of an `mpu` object."""
        mpu, control = self.mpu, self._control
        if mpu is None or bwc_tensor_model_parallel_world_size(mpu) < 2:
            return TensorParallel(locate_branches(self.module))
        group, members = bwc_tensor_model_parallel_group(mpu), dist.get_world_size(self.seq_data_parallel_group)
        if members * dist.get_world_size(group) != dist.get_world_size():
            raise ValueError(
                f"mpu: {members} data-parallel times {dist.get_world_size(group)} tensor-parallel ranks are not the "
                f"{dist.get_world_size()} ranks that run, and there can be no other kind"
            )
        whole = self._before_autotp
        if whole is None:
            found = of_author(self.module, group, control)
        else:
            found = of_autotp(self.module, whole, group, control)
        found.check_replicated(dict(self.module.named_parameters()), control)
        self._state_dicts = WholeStateDicts(self.module, found.shards, group)
        return found

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
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        frozen = [name for name, p in self.mask.parameters.items() if id(p) in given and not self.mask.trainable[name]]
        self._known_parameters = KnownParameters(self.module, self.mask.parameters, frozen)
        self._param_group_of = self._param_groups(optimizer)
        return SubnetworkOptimizer(
            self._apply(self.block, self.plan, self.mask, optimizer),
            loss_scaler(self),
            skips_overflow=skips_overflow(self),
            reports_norm=bool(self.zero_compute_grad_norm()),
            process_group=self.seq_data_parallel_group,
        )

    def _apply(
        self, block: SubnetworkConfig, plan: Plan, mask: Mask, optimizer: torch.optim.Optimizer
    ) -> ShardedOptimizer:
        """Make the dense module this rank's subnetwork, and an optimizer step this rank's shards of it."""
        self.block, self.plan, self.mask = block, plan, mask
        costs = unit_costs(self.module, mask.plan.units)
        self.coverage = plan.mean_coverage([cost.flops for cost in costs])
        every = sorted({tuple(ranks) for ranks in gather_objects(self._members(), self._control)})
        holder_sets = {holders for pieces in mask.pieces.values() for _, holders in pieces}
        self.groups = Groups(holder_sets, ranks=every, control=self._control, comm=deepspeed_comm)
        mask.apply()
        if (deferred := self._deferred) is not None:
            seed = gather_objects(deferred.seed, self._control)[0]
            run_on_all_ranks(lambda: deferred.materialize(mask, self.device, seed), self._control)
            self._deferred = None
        self._partial_sums = self.tensor_parallel.sum_partial_gradients(mask.parameters)
        self.dense_view = DenseView(
            mask,
            self.groups,
            self.device,
            meet=self._meetings.meet,
            changed=lambda: self.optimizer.refresh_fp32_params(),
            is_scaled=block.dense_branch_scale == "coverage",
        )
        return ShardedOptimizer(
            optimizer,
            mask,
            self.groups,
            self._param_group_of,
            regime="backward" if plan.regime == "backward" else "forward",
            replicated=self.tensor_parallel.replicated(mask.parameters),
            **sharded_options(self),
        )

    def lay_out(self, block: SubnetworkConfig, plan: Plan, mask: Mask) -> None:
        """Under another plan, without the optimizer's state; every rank calls it while the module is dense."""
        self.dense_view.close()
        self.optimizer.sharded.close()
        self.groups.close()
        for handle in self._partial_sums:
            handle.remove()
        self.optimizer.state.clear()
        self.optimizer.sharded = self._apply(block, plan, mask, self.optimizer.optimizer)

    def _members(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return dist.get_process_group_ranks(self.seq_data_parallel_group)

    def _param_groups(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Index of the param group of each parameter to be trained, by dense name; the same on all ranks."""
        allow = bool(self.block.allow_optimizer or self.zero_allow_untested_optimizer())

        def find() -> dict[str, int]:
            check_optimizer(type(optimizer), allow=allow)
            return param_group_indices(optimizer, self.mask.parameters, self.mask.trainable)

        found = run_on_all_ranks(find, self._control)
        every = {name: index for other in gather_objects(found, self._control) for name, index in other.items()}
        # Whoever built the optimizer while an earlier engine's mask was there could not see what that had frozen.
        found |= {name: index for name, index in every.items() if name in self._frozen_before}
        found = {name: found[name] for name in self.mask.parameters if name in found}
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

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> Any:
        """As DeepSpeed's."""
        self._refuse_dense("backward")
        if self.optimizer.sharded.stage == 2:
            self._meetings.passing()
        self._step_events.note(loss, is_share=not scale_wrt_gas)
        return super().backward(loss, retain_graph, scale_wrt_gas, **options)

    def zero_grad(self) -> None:
        """As DeepSpeed's; at stage 2 all ranks call it together, since averages are spread over them."""
        super().zero_grad()
        self.optimizer.zero_grad()

    def step(self, lr_kwargs: Any = None) -> None:
        """As DeepSpeed's; at the boundary a collective of all ranks."""
        self._refuse_dense("step")
        is_managed = self.managed_gradient_accumulation()
        if self.is_gradient_accumulation_boundary() or not is_managed:
            by_caller = self._is_gradient_accumulation_boundary is not None or not is_managed
            if by_caller and self.optimizer.sharded.stage == 2:  # ranks may have run other numbers of backward passes
                self._meetings.meet("engine.step")
            self._meetings.passing()
            self._known_parameters.check()
            self._refuse_frozen()
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps > before:
            self._step_events.write()
        if self.block.check_agreement and self._step_applied:
            run_on_all_ranks(lambda: check_agreement(self.mask, self.groups), self._control)
            held = self.held_tensors()
            run_on_all_ranks(lambda: self.tensor_parallel.check_replicated(held, self._control), self._control)
        follow_schedule(self, self.global_steps)

    def replan(self, block: Mapping[str, Any], *, stage: int | None = None) -> Replanned:
        """Go on under another plan, from the end of a step; all ranks call it with the same keys.

        The dense model, fp32 masters and moments are the same numbers afterwards, wherever they are; step counts, the
        learning rate, the loss scale, data and random numbers go on. A Parameter may have another shape than before.

        Args:
            block: keys of the config's block that change.
            stage: ZeRO's from now on; None leaves it.

        Raises:
            ValueError, RuntimeError: on all ranks, before anything is changed.
        """
        self._meetings.meet("engine.replan")
        return replan(self, run_on_all_ranks(lambda: new_config(self, block, stage), self._control), stage)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's, of the dense model; all ranks call it, and it loads on any layout. With the block's
        `checkpoint.asynchronous` it returns when everything is copied to host memory.

        Raises:
            ValueError: client state that could not be loaded safely.
            RuntimeError: on all ranks, if it cannot be written; earlier checkpoints are as they were. On those that
                wait, if a rank does not call it.
        """
        self._before_checkpoint("save_checkpoint")
        options = {"latest": save_latest, "exclude_frozen": exclude_frozen_parameters}
        save(self, Path(save_dir), tag, client_state or {}, **options)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's, on the layout that wrote it or on another one; all ranks call it. With a schedule the engine
        is in the phase of the checkpoint's step afterwards.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed: it is damaged, or of another model.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint: custom_load_fn is not possible; load with load_module_strict=False")
        self._before_checkpoint("load_checkpoint")
        found = load(
            self,
            Path(load_dir),
            None if tag is None else str(tag),
            module_only=load_module_only,
            scheduler=load_lr_scheduler_states,
            optimizer_states=load_optimizer_states and not load_module_only,
            strict=load_module_strict,
        )
        follow_schedule(self, self.global_steps)
        return found

    def load_pretrained(self, folder: str | Path) -> None:
        """Start from a local folder in Hugging Face format (safetensors); every rank calls it and reads what it holds.
        The optimizer's moments, counters and the learning rate's schedule stay as they are.

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        self._before_checkpoint("load_pretrained")
        load_pretrained(rank_state(self), Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is written in the background is complete; all ranks call it, before they leave.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        self.checkpoints.wait()

    def _before_checkpoint(self, call: str) -> None:
        self._refuse_dense(call)
        self._known_parameters.check()
        self._meetings.meet(call)
        average_running_statistics(self.mask, self.seq_data_parallel_group, self.device)

    # ---- the dense model ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As DeepSpeed's; going back to training ends an evaluation of the dense model."""
        if mode and "dense_view" in vars(self):
            self.dense_view.end_evaluation()
        super().train(mode)
        return self

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context in which `module` is the dense model; all ranks enter and leave together. The next step starts from
        the weights as they are left. For gradients of the dense model use `torch.autograd.grad`.

        Raises:
            RuntimeError: Parameters were replaced (`load_state_dict(assign=True)`).
        """
        with self.dense_view.resident(), self._whole_state_dicts():
            yield
            self._known_parameters.check()

    def _whole_state_dicts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state_dicts is None else self._state_dicts.whole()

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Write the dense model as the module's own `save_pretrained` does; all ranks call it, rank 0 writes."""

        def write() -> None:
            state = {} if self._state_dicts is None else {"state_dict": self.module.state_dict()}  # a collective
            if dist.get_rank() == 0:
                self.module.save_pretrained(str(folder), **state, **options)
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(folder))

        with self.dense_view.resident("save_pretrained"), self._whole_state_dicts():
            run_on_all_ranks(write, self._control)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's, of the dense model."""
        save = super().save_16bit_model
        with self.dense_view.resident("save_16bit_model"), self._whole_state_dicts():
            run_on_all_ranks(lambda: save(save_dir, save_filename, exclude_frozen_parameters), self._control)
        return True

    def reestimate_batch_norm(self, batches: Iterable[Any], *, num_batches: int) -> int:
        """As `sdp_deepspeed.reestimate_batch_norm`, of this engine's dense model."""
        norms = tracking_norms(self.module)
        if not norms:
            log_dist(f"{KEY}: the model has no batch norms with running statistics", ranks=[0])
            return 0

        with unchanged_random_state(), self.dense_view.resident("reestimate_batch_norm"):  # batches and models may draw
            own = batches_of(batches, num_batches, self._control)
            found = run_on_all_ranks(lambda: estimate_statistics(self.module, own), self._control)
            write_statistics(found, self.seq_data_parallel_group)
        return len(norms)

    def _refuse_dense(self, call: str) -> None:
        self.dense_view.end_evaluation()
        if self.dense_view.is_resident:
            raise RuntimeError(f"{call} inside engine.dense(): leave it first, on all ranks")

    def _refuse_frozen(self) -> None:
        """DeepSpeed's stage 0 in fp32 does not step what was frozen after the start. At the other stages, and in low
        precision, momentum and decay go on moving it, as they do here at every stage."""
        sharded = self.optimizer.sharded
        if sharded.stage == 0 and self.get_data_types()[0] == torch.float32:
            names = dict.fromkeys(name for bucket in sharded.held for name in bucket.names)
            if frozen := [name for name in names if not self.mask.parameters[name].requires_grad]:
                raise RuntimeError(
                    f"{quoted(frozen)} stopped requiring gradients, but momentum and decay would move it at ZeRO stage "
                    "0: freeze it before deepspeed.initialize"
                )

    def release(self) -> None:
        """Give the dense model back, for another engine; this one trains no more. Every rank calls it."""
        self._refuse_dense("deepspeed.initialize")
        self.checkpoints.wait()
        self.dense_view.make_resident("deepspeed.initialize", scales=False)
        self.dense_view.close()
        self.optimizer.destroy()
        for handle in self._partial_sums:
            handle.remove()

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores for its subnetwork, by dense name."""
        tensors: dict[str, torch.Tensor] = {**self.mask.parameters, **self.mask.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


_engines: WeakKeyDictionary[nn.Module, weakref.ref[SubnetworkEngine]] = WeakKeyDictionary()  # by their module


def _make_whole(model: nn.Module) -> frozenset[str]:
    """A model that an earlier engine cut is dense again, and the earlier engine is at its end.

    Returns:
        Names of parameters that only the earlier mask had frozen on this rank.

    Raises:
        ValueError: a copy, or a part, of such a model.
    """
    earlier = _engines.pop(model, lambda: None)()
    frozen: frozenset[str] = frozenset()
    if earlier is not None:
        mask = earlier.mask
        frozen = frozenset(n for n, p in mask.parameters.items() if mask.trainable[n] and not p.requires_grad)
        earlier.release()
    refuse_cut(model)
    return frozen


def refuse_cut(model: nn.Module) -> None:
    """ValueError for a model of which an engine of ours has made a subnetwork."""
    if any("_sdp_masked" in vars(module) for module in model.modules()):
        raise ValueError(
            f"{KEY}: an earlier engine cut this model down to subnetworks: build the model anew, or copy it with "
            "copy.deepcopy inside `with engine.dense():`"
        )


def _check_mpu(mpu: Any) -> None:
    """ValueError for what an `mpu` object may name besides tensor and data parallelism."""
    sizes = {"pipeline": 1 if mpu is None else bwc_pipeline_parallel_world_size(mpu)}
    sizes["sequence"] = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    for what, size in sizes.items():
        if size > 1:
            raise ValueError(f"{KEY}: mpu has {size} {what}-parallel ranks; tensor and data parallelism are possible")


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
