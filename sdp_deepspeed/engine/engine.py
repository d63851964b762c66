"""SubnetworkEngine: DeepSpeed's engine with each rank's module cut down to its subnetwork.

The order of the constructor is DeepSpeed's: the module is cast, moved and broadcast; then `apply_plan` makes it this
rank's subnetwork; then the optimizer is built, which the masked averaging wraps. A model without storage is cast and
cut down as it is; only then it gets what is left of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed import comm as deepspeed_comm
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.utils import log_dist, logger
from torch import nn

from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, persistent_buffers
from sdp_deepspeed.checkpoint.state.trained_state import RankState
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.deferred_init.materialize import DeferredModel, check_deferred_alike, refuse_tensor_parallel
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import Channel, HostGroup, make_host_group
from sdp_deepspeed.distributed.last_acts import LastActs, make_last_acts
from sdp_deepspeed.distributed.lifeline import watch_ranks
from sdp_deepspeed.engine.apply_plan import AppliedPlan, ModelAtStart, apply_plan
from sdp_deepspeed.engine.consistency import check_holders_agree
from sdp_deepspeed.engine.deepspeed_settings import loss_scaler, nodes_of_ranks, optimizer_settings, rank_groups
from sdp_deepspeed.engine.dense_export import install_save
from sdp_deepspeed.engine.full_tensors import FullTensors, install_full_access
from sdp_deepspeed.engine.given import Given
from sdp_deepspeed.engine.memory_format import row_major
from sdp_deepspeed.engine.schedule_calls import ScheduleCalls
from sdp_deepspeed.engine.start import Start
from sdp_deepspeed.engine.step_events import write_step_events
from sdp_deepspeed.masking.compiled import compile_in_place
from sdp_deepspeed.masking.other_weights import OtherWeights
from sdp_deepspeed.masking.replaced import KnownParameters
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.param_groups import agree_on_groups, as_given
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.support.refusals import refuse_optimizer, refuse_shared_memory
from sdp_deepspeed.tensor_parallel.checks import check_size, translated_autotp_errors
from sdp_deepspeed.tensor_parallel.model import ModelBeforeAutoTP

_NO_OPTIMIZER = f"{KEY} needs an optimizer: name one in the config, or give deepspeed.initialize one"


class SubnetworkEngine(ScheduleCalls):
    """What `deepspeed.initialize` returns for a config with the block `subnetwork_data_parallel`.

    Attributes:
        block: the parsed block.
        plan: who holds what, the same on every rank.
        dp_group: the data-parallel group.
        world: all ranks; more than the data-parallel group under tensor parallelism.
    """

    block: SubnetworkConfig
    dp_group: Communicator
    world: Communicator
    optimizer: SubnetworkOptimizer
    _ranks: Gatherer
    _host: HostGroup
    _last_acts: LastActs
    _applied: AppliedPlan
    _known_parameters: KnownParameters
    _other_weights: OtherWeights
    _given: Given
    _before_autotp: ModelBeforeAutoTP | None = None
    _deferred: DeferredModel | None = None  # until the model has storage

    def __init__(self, args: Any, model: nn.Module, *rest: Any, **options: Any) -> None:
        start: Start = vars(self).pop("start")
        assert start.block is not None, "the import hook builds this engine for configs with the block only"
        object.__setattr__(self, "block", start.block)
        object.__setattr__(self, "_ranks", start.ranks)
        object.__setattr__(self, "schedule", start.schedule)
        if start.schedule is not None:
            options["config"] = start.schedule.config_after(0)
        start.check(model, options)

        def prepare() -> nn.Module:
            prepared = compile_in_place(model)
            object.__setattr__(self, "_deferred", DeferredModel.of(prepared))
            refuse_shared_memory(prepared)  # a cast to another dtype would untie them without a word
            object.__setattr__(self, "_given", Given.of(options))
            return prepared

        model = run_on_all_ranks(start.ranks, prepare)
        super().__init__(args, model, *rest, **(options | {"model_parameters": self._given.parameters}))
        if self.optimizer is None:
            raise ValueError(_NO_OPTIMIZER)
        self._known_parameters = KnownParameters(self.module)
        self._other_weights = OtherWeights(self.module, self._applied.mask)
        install_save(self._export())
        install_full_access(self, dict(self.module.named_parameters(remove_duplicate=False)))
        self.checkpointer = Checkpointer.build(
            self, self._host, options=start.block.checkpoint, accepts_universal=self.load_universal_checkpoint()
        )
        self.step_events = write_step_events(self, self.world, dp_group=self.dp_group)
        self._begin_schedule()

    @property
    def plan(self) -> Plan:
        """Who holds what, in the dense model's coordinates; the same on every rank."""
        return self._applied.plan

    @property
    def coverage(self) -> float:
        """C of the plan, units weighted by their FLOPs."""
        return self._applied.coverage

    @property
    def tensor_parallel_layout(self) -> int:
        """Ranks of a tensor-parallel group, 1 without."""
        return self._applied.model.shards.size

    def _configure_tensor_parallel(self, model: nn.Module, tp_config: Any) -> Any:
        refuse_tensor_parallel(self._deferred)
        check_size(int(self.autotp_size()), torch.distributed.get_world_size())
        self._before_autotp = ModelBeforeAutoTP.of(model)
        with translated_autotp_errors(model):
            return super()._configure_tensor_parallel(model, tp_config)

    def _broadcast_model(self) -> None:
        if self._deferred is None:  # else each rank makes the same weights
            with row_major(self.module.parameters()):
                super()._broadcast_model()

    def _configure_distributed_model(self, model: nn.Module) -> None:
        self._host = make_host_group(torch.distributed, self._ranks, logger.warning)
        self.world = Communicator(deepspeed_comm, objects=self._host.channel(Channel.WORLD))
        check_deferred_alike(self._deferred, self.world)
        self.dont_change_device |= self._deferred is not None
        super()._configure_distributed_model(model)
        self._last_acts = make_last_acts(torch.distributed, self.seq_data_parallel_group, logger.warning)
        watch_ranks(self, torch.distributed, self.world, self.block.silence_limit)
        groups = rank_groups(self, self.world, self._host, self._last_acts)
        self.dp_group = groups.dp_group
        start = ModelAtStart(
            model,
            self.device,
            stage=int(self.zero_optimization_stage()),
            nodes=partial(nodes_of_ranks, groups.dp_group, groups.tp_group),
            before_autotp=self._before_autotp,
            deferred=self._deferred,
        )
        self._given = run_on_all_ranks(self.world, partial(self._given.built, model))
        self._applied = apply_plan(start, self.block, groups, self._later_blocks())
        self._deferred = None

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        kind = self.optimizer_name() if client_optimizer is None else type(client_optimizer)
        if client_optimizer is None or isinstance(client_optimizer, torch.optim.Optimizer):
            run_on_all_ranks(self.world, partial(refuse_optimizer, kind, self.block))
        super()._configure_optimizer(self._given.optimizer, model_parameters)

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        with as_given(self._applied.model):
            return super()._configure_basic_optimizer(model_parameters)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str:
        run_on_all_ranks(self.world, partial(refuse_optimizer, type(basic_optimizer), self.block))
        return ZERO_OPTIMIZATION  # every stage and precision takes our optimizer

    def _configure_zero_optimizer(self, optimizer: Any) -> SubnetworkOptimizer:
        if optimizer is None:
            raise ValueError(_NO_OPTIMIZER)
        settings = optimizer_settings(self, self.block)
        wrapped = SubnetworkOptimizer(
            optimizer,
            agree_on_groups(optimizer, self._applied.model, self.dp_group, settings=settings),
            self.dp_group,
            settings=settings,
            tp_group=self._applied.parallel.group,
            loss_scaler=loss_scaler(self),
        )
        wrapped.install()
        return wrapped

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """After a backward pass; at stages 0 and 1 gradients stay local until `step`, where they are averaged."""
        self.optimizer.end_backward()

    def clip_fp32_gradients(self) -> None:
        """Nothing: the optimizer clips by the norm of the averaged dense gradient."""

    def backward(self, loss: torch.Tensor, *options: Any, **more: Any) -> Any:
        """As DeepSpeed's."""
        self._refuse_half_replanned("backward")  # others are to hear of that error, not of this call
        with self._last_acts.doing(self._place("backward pass")):
            self._refuse_resident("backward")  # what is refused is no pass, and others have none to match it
            with self.optimizer.backward_pass():
                return super().backward(loss, *options, **more)

    def zero_grad(self) -> None:
        """As DeepSpeed's; at stage 2 all ranks call it together, since averages are spread over them."""
        super().zero_grad()
        self.optimizer.zero_grad()

    def step(self, lr_kwargs: Any = None) -> None:
        """As DeepSpeed's; at the boundary a collective of all data-parallel ranks."""
        self._refuse_half_replanned("step")
        with self._last_acts.doing(self._place("step")):
            self._refuse_resident("step")
            self._known_parameters.check()
            self._look_at_caller()
            super().step(lr_kwargs)
            if self._step_applied:  # nobody needs others for it later: one rank may evaluate alone (backward regime)
                self._applied.statistics.average()
        if self.block.check_agreement and self._step_applied:
            holders_agree = partial(check_holders_agree, self._applied.with_statistics, self.dp_group)
            replicas_agree = partial(self._applied.parallel.check_replicated, self.held_tensors())
            run_on_all_ranks(self.world, holders_agree, replicas_agree)
        self._follow_schedule(self.global_steps)

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores for its subnetwork, by dense name; parts of them where neurons
        or heads are cut, and "<name> (lacking)" for what it stores but does not train (backward regime)."""
        return self._applied.mask.stored()

    def lacking_tensors(self) -> list[torch.Tensor]:
        """What this rank stores beside the module's parameters: neurons and heads that it does not train."""
        return list(self._applied.model.views.lacking.values())

    def _place(self, what: str) -> str:
        return f"its {what} (step {self.global_steps + 1}, micro-step {self.micro_steps + 1})"

    def rank_chunks(self) -> RankChunks:
        """Where this rank's parameters and persistent buffers lie in the dense model."""
        model = self.optimizer.model
        return RankChunks(model, persistent_buffers(self.module, model.views.shapes))

    def rank_state(self) -> RankState:
        """What checkpoints save and restore of this rank."""
        rank_chunks = self.rank_chunks()
        return RankState(rank_chunks, OptimizerState(self.optimizer, rank_chunks))

    def log_on_rank_0(self, text: str, level: int) -> None:
        """In DeepSpeed's log."""
        log_dist(text, ranks=[0], level=level)

    def full_tensors(self) -> FullTensors:
        """What DeepSpeed's `safe_get_full_fp32_param` and its like read and write.

        Raises:
            ValueError: under tensor parallelism, where nobody has put it together.
        """
        self._refuse_resident("safe_get_full_* or safe_set_full_*")
        if self._applied.parallel.group is not None:
            raise ValueError(
                f"{KEY}: safe_get_full_* and safe_set_full_* of DeepSpeed are not possible under tensor parallelism; "
                "read what engine.save_checkpoint wrote"
            )
        return FullTensors(self.optimizer, self.rank_chunks(), self.dp_group)
