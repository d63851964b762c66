"""SubnetworkEngine: DeepSpeed's engine, with each rank's module reduced to its subnetwork.

Order of construction:

1. DeepSpeed's constructor casts and moves the module, and broadcasts its weights.
2. The plan is computed (`_configure_distributed_model`).
3. DeepSpeed or the user builds the optimizer of the whole model, so that param groups are equal on all ranks.
4. The mask is applied, and the sharded optimizer takes over (`_configure_zero_optimizer`).

Order of a training step; methods with an underscore, and `allreduce_gradients`, are called by DeepSpeed:

1. `forward` runs the masked module (masking/). Forward regime: absent blocks return zeros (absent_blocks.py), cut
   tensors have fewer rows or columns (mask.py), and with `branch_scale` what a branch adds is multiplied by 1 / C
   (scale.py). Backward regime: it is the dense model, in which absent weights are frozen (mask.py, split_layers.py).
2. `backward` calls DeepSpeed's, which multiplies the loss by the loss scale. `_backward_prologue` tells the reducer
   whether this is the last micro-step. Hooks of the reducer then receive each gradient (`Reducer._on_gradient`).
   `allreduce_gradients`, or under `no_sync` `_backward_epilogue`, ends the pass (`Reducer.finish_backward`, which
   averages at stage 2, and at stage 1 after the last micro-step with `overlap_comm`).
3. `step` checks that no Parameter was replaced, or at stage 0 frozen (`_before_boundary`; at stage 2 after a barrier of
   all ranks, if the caller sets the boundary). DeepSpeed's `step` then calls `SubnetworkOptimizer.step`
   (zero_optimizer.py), which

   - calls `ShardedOptimizer.step` (parallel/optimizer.py) with the loss scale. That averages the remaining gradients
     (`Reducer.finish_step`), computes their norm (one all-reduce; see `gradient_norm`), unscales and clips, calls the
     `step` of the user's optimizer on this rank's shards, and all-gathers weights: in the forward regime over the
     holders of each bucket (`_gather_shards`), in the backward regime over all ranks (`_gather_range`). If the norm is
     not finite, it skips the update where DeepSpeed does (`skips_overflow`);
   - tells the loss scaler whether the update was skipped;
   - keeps the norm (`compute_grad_norm`), and whether the update was skipped, for DeepSpeed to read.

   DeepSpeed steps the learning-rate schedule. After that come the monitor's events, `check_agreement` and a new plan
   (`Plans.follow`), where they are due.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.utils import log_dist
from torch import nn

from sdp_deepspeed.batch_norm import average_running_statistics, estimate_on_all_ranks, tracking_norms
from sdp_deepspeed.checkpoint.atomic_folder import output_folder
from sdp_deepspeed.checkpoint.export_and_import import load_pretrained
from sdp_deepspeed.checkpoint.hf_folder import save_pretrained
from sdp_deepspeed.checkpoint.random_state import unchanged_random_state
from sdp_deepspeed.checkpoint.save_and_load import COUNTERS
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.engine.core import Core
from sdp_deepspeed.engine.earlier_engines import engines, make_whole
from sdp_deepspeed.engine.full_access import install_full_access
from sdp_deepspeed.engine.monitor import StepEvents
from sdp_deepspeed.engine.optimizer_options import check_bucket_size, loss_scaler, skips_overflow, step_options
from sdp_deepspeed.engine.plans import Plans, Replanned
from sdp_deepspeed.engine.refused_settings import (
    refuse_config,
    refuse_frozen,
    refuse_single_processes,
    refuse_unused,
)
from sdp_deepspeed.engine.tensor_parallel import (
    DividedEngine,
    check_mpu,
    refuse_stage,
)
from sdp_deepspeed.engine.zero_optimizer import SubnetworkOptimizer
from sdp_deepspeed.init import DeferredWeights, has_meta_tensors
from sdp_deepspeed.masking.wrappers import compile_in_place
from sdp_deepspeed.parallel.consistency import check_same_parameters, run_on_all_ranks
from sdp_deepspeed.parallel.groups import control_group
from sdp_deepspeed.parallel.refused_models import refuse_model
from sdp_deepspeed.plan.plan import Plan


class SubnetworkEngine(DividedEngine):
    """The engine that `deepspeed.initialize` returns for a config with the block `subnetwork_data_parallel`."""

    block: SubnetworkConfig
    _core: Core  # the model under the current plan
    optimizer: SubnetworkOptimizer
    _deferred: DeferredWeights | None = None  # of a model built under `Init`

    def __init__(self, args: Any, model: nn.Module, *rest: Any, **options: Any) -> None:
        """Arguments are those of DeepSpeed's engine; import_hook.py has set `block`."""
        self._control = control_group()

        def prepare() -> nn.Module:
            self._frozen_before = make_whole(model)
            refuse_config(options["config"], options["config_class"])
            refuse_single_processes()
            refuse_model(model)
            if options.get("mesh_device") is not None:
                raise ValueError(f"{KEY}: mesh_param (sequence parallelism) is not supported; remove it")
            check_mpu(options.get("mpu"))
            if has_meta_tensors(model):
                self._deferred = DeferredWeights(model)
                options["dont_change_device"] = True
            return compile_in_place(model)

        model = run_on_all_ranks(prepare, self._control)
        super().__init__(args, model, *rest, **options)
        if self.optimizer is None:
            raise ValueError(f"{KEY} needs an optimizer: name one in the config, or pass one to deepspeed.initialize")
        engines[model] = weakref.ref(self)
        self._step_events = StepEvents(self, self._core)
        for name in self._core.sharded.param_group_of:
            install_full_access(self._core.mask.parameters[name], name, self.optimizer)

    @property
    def plan(self) -> Plan:
        """Which subnetwork holds which unit, the same on every rank."""
        return self._core.plan

    @property
    def coverage(self) -> float:
        """C of the plan, weighted by FLOPs."""
        return self._core.coverage

    @property
    def phase(self) -> int:
        """Current phase of the schedule."""
        return self._plans.phase

    # ---- construction -------------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        self._find_tensor_parallel()
        stage = int(self.zero_optimization_stage())
        refuse_stage(stage, self.tensor_parallel)
        if stage == 0:
            log_dist(f"{KEY}: ZeRO stage 0 runs as stage 1, which sends the same and shards more", ranks=[0])
        self._core = Core(
            self.module,
            self.device,
            self.block,
            self.tensor_parallel,
            self._data_parallel_groups(),
            self._control,
            self._deferred,
        )
        self._plans = Plans(self, self._core)

    def _broadcast_model(self) -> None:
        check_same_parameters(self.module, self._data_parallel_groups(), self._control)
        if self._deferred is not None:
            return  # all ranks initialize the same weights
        for parameter in self.module.parameters():  # DeepSpeed cannot broadcast channels-last; buckets are row-major
            if not parameter.is_contiguous() or (parameter.dim() and parameter.stride(-1) != 1):
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        super()._broadcast_model()

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """As in DeepSpeed; an error of one rank is raised on all."""
        if client_optimizer is not None and not isinstance(client_optimizer, torch.optim.Optimizer):
            parameters = list(self.module.parameters()) if model_parameters is None else list(model_parameters)
            built = run_on_all_ranks(lambda: client_optimizer(parameters), self._control)
            client_optimizer = lambda _: built  # noqa: E731 (DeepSpeed checks for a function)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str:
        return ZERO_OPTIMIZATION  # our optimizer serves every stage and precision

    def _configure_zero_optimizer(self, optimizer: Any) -> SubnetworkOptimizer:
        check_bucket_size(self)
        allow = bool(self.block.allow_optimizer or self.zero_allow_untested_optimizer())
        options = step_options(self, int(self.zero_optimization_stage()))
        self._core.take_optimizer(optimizer, frozen=self._frozen_before, allow=allow)
        self._plans.check_later()
        self._core.start(options)
        self._deferred = None
        return SubnetworkOptimizer(
            self._core,
            loss_scaler(self),
            skips_overflow=skips_overflow(self),
            reports_norm=bool(self.zero_compute_grad_norm()),
            process_group=self.seq_data_parallel_group,
        )

    # ---- training -----------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed.

        Raises:
            RuntimeError: a Parameter, or outside `dense` its `.data`, was replaced.
        """
        self._core.check_parameters()
        return super().forward(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> Any:
        """As in DeepSpeed.

        Raises:
            RuntimeError: inside `dense`; a Parameter was replaced.
        """
        self._core.require_subnetwork("backward")
        self._core.check_parameters()
        if self._core.sharded.options.stage == 2:
            self._core.barrier.record_step()  # so that ranks that wait in another call raise an error at once
        self._step_events.note(loss, is_share=not scale_wrt_gas)
        return super().backward(loss, retain_graph, scale_wrt_gas, **options)

    def _backward_prologue(self) -> None:
        """Called by DeepSpeed before each backward pass, in which the reducer's hooks receive the gradients."""
        is_last = self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt
        self._core.sharded.reducer.is_last_micro_step = is_last
        super()._backward_prologue()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Called by DeepSpeed's engine after each backward pass. Stage 2 reduces gradients here; stage 1 does so at the
        accumulation boundary with `overlap_comm`, otherwise in `step`, at whose beginning a second call, with unmanaged
        accumulation, has no effect."""
        self._core.sharded.reducer.finish_backward()

    def _backward_epilogue(self) -> None:
        if self.inside_no_sync_ctxt:  # DeepSpeed does not call `allreduce_gradients`
            self._core.sharded.reducer.finish_backward()
        super()._backward_epilogue()

    def _flush_coalesced_reduction_zero12(self, optimizer: SubnetworkOptimizer) -> None:
        """Called by DeepSpeed at the end of `coalesce_grad_reduction`, which precedes a step. Collective at stage 2,
        and with `overlap_comm`."""
        reducer = optimizer.sharded.reducer
        reducer.is_last_micro_step = True
        reducer.finish_backward()

    def step(self, lr_kwargs: Any = None) -> None:
        """As in DeepSpeed; collective at the accumulation boundary. DeepSpeed's `step` calls the optimizer's, which
        communicates.

        Raises:
            RuntimeError: inside `dense`; a Parameter was replaced, or frozen (stage 0); at stage 2, if the caller sets
                the boundary, a rank does not call it.
            AssertionError: on all ranks, if a Parameter had no gradient (`ignore_unused_parameters`).
        """
        self._core.require_subnetwork("step")
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            self._before_boundary()
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps > before:
            self._step_events.write()
        if self.block.check_agreement and self.was_step_applied():
            self._core.check_agreement()
        self._plans.follow(self.global_steps)

    def _before_boundary(self) -> None:
        """Checks before a step that updates weights, and its announcement to ranks that wait in another call."""
        is_managed = self.managed_gradient_accumulation()
        by_caller = self._is_gradient_accumulation_boundary is not None or not is_managed
        if by_caller and self._core.sharded.options.stage == 2:  # the number of backward passes may differ
            self._core.barrier.wait("engine.step")
        self._core.barrier.record_step()
        self._core.check_parameters()
        refuse_frozen(self, self._core.sharded)
        if not self.zero_ignore_unused_parameters() and self.zero_optimization() and self.zero_cpu_offload():
            run_on_all_ranks(lambda: refuse_unused(self._core.sharded), self._control)

    def clip_fp32_gradients(self) -> None:
        """Does nothing: the sharded optimizer clips by the norm of the averaged dense gradient."""

    def zero_grad(self) -> None:
        """As in DeepSpeed; see `SubnetworkOptimizer.zero_grad`."""
        self.optimizer.zero_grad()
        super().zero_grad()

    def replan(self, block: Mapping[str, Any], *, stage: int | None = None) -> Replanned:
        """Continue training under another plan. Collective, between two steps, with equal arguments on all ranks.

        Weights, fp32 masters and moments keep their values; step counts, learning rate, loss scale, data order and
        random state continue. Parameters may change their shape.

        Args:
            block: keys of the block that change.
            stage: new ZeRO stage. Default: unchanged.

        Raises:
            ValueError, RuntimeError: on all ranks, before anything is changed.
        """
        self._core.barrier.wait("engine.replan")
        return self._plans.replan(block, stage)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the dense model; collective. The checkpoint loads on any layout.

        With the option `checkpoint.asynchronous` it returns once the state has been copied to host memory.

        Raises:
            ValueError: no folder, tags that differ between ranks, or client state that cannot be loaded safely.
            AssertionError: tags that differ, with `checkpoint.tag_validation` "Fail".
            RuntimeError: on all ranks, if the checkpoint cannot be written; earlier ones are intact. On the waiting
                ranks, if a rank does not call it.
        """
        self._before_checkpoint("save_checkpoint")
        if self.checkpoint_tag_validation_fail():
            self._checkpoint_tag_validation(str(tag))
        scaler = vars(self.optimizer.loss_scaler).items()
        self._core.checkpoints.save(
            save_dir,
            tag,
            self._core.state(),
            {counter: getattr(self, counter) for counter in COUNTERS},
            lr_scheduler=self.lr_scheduler,
            loss_scaler={key: value for key, value in scaler if isinstance(value, bool | int | float)},
            client_state=client_state,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
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
        """Load a checkpoint that was saved on any layout; collective. With a schedule, the engine continues in the
        phase of the checkpoint's step.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed, if it is damaged or of a different model.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint: custom_load_fn is not supported; use load_module_strict=False")
        self._before_checkpoint("load_checkpoint")
        core, is_resumed = self._core, not load_module_only
        scheduler = self.lr_scheduler if is_resumed and load_lr_scheduler_states else None
        checkpoint = core.checkpoints.find(load_dir, tag, self._control, lr_scheduler=scheduler)
        if checkpoint is None:
            return None, None
        common = checkpoint.facts["common"]
        self.optimizer.zero_grad()  # drop gradients of the current run
        if is_resumed:  # per-rank state is restored under the same plan only
            self._plans.follow(common["counters"]["global_steps"])
        core.checkpoints.restore(
            checkpoint,
            core.state(),
            optimizer_states=load_optimizer_states and is_resumed,
            own_state=is_resumed,
            strict=load_module_strict,
        )
        if is_resumed:
            self._restore_progress(common, scheduler)
        return str(checkpoint.path), common["client_state"]

    def _restore_progress(self, common: Mapping[str, Any], scheduler: Any) -> None:
        """Set counters, loss scale and LR scheduler, and restart the current step, which may have another number of
        micro-batches."""
        for counter, value in common["counters"].items():
            setattr(self, counter, value)
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        if scheduler is not None and common["lr_scheduler"] is not None:
            scheduler.load_state_dict(common["lr_scheduler"])
        scaler = self.optimizer.loss_scaler
        if scaler.dynamic and common["loss_scaler"].get("dynamic", True):  # a run in bf16 or fp32 saved the scale 1
            vars(scaler).update(common["loss_scaler"])

    def load_pretrained(self, folder: str | Path) -> None:
        """Load weights from a local folder in Hugging Face format (safetensors). Collective; each rank reads what it
        holds. Moments, counters and the LR scheduler are unchanged.

        Raises:
            ValueError: on all ranks, before anything is changed, if files are missing, damaged, or of a different
                model.
        """
        self._before_checkpoint("load_pretrained")
        load_pretrained(self._core.state(), Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous checkpoint is complete. Collective; call it before the program exits.

        Raises:
            RuntimeError: on all ranks, if the checkpoint could not be written.
        """
        self._core.checkpoints.wait()

    def _before_checkpoint(self, call: str) -> None:
        self._core.require_subnetwork(call)
        self._core.check_parameters()
        self._core.barrier.wait(call)
        average_running_statistics(self._core.mask, self._core.groups.data_parallel, self.device)

    # ---- the dense model ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As in DeepSpeed. Training mode makes the module the subnetwork again."""
        if mode and self.optimizer is not None:
            self._core.dense_view.end_evaluation()
        super().train(mode)
        return self

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context in which `module` is the dense model. Collective: all ranks enter and leave together.

        Weights that are changed inside are kept. For gradients of the dense model use `torch.autograd.grad`.

        Raises:
            RuntimeError: Parameters were replaced, for example by `load_state_dict(assign=True)`.
        """
        with self._core.dense_view.resident(), self._state_dicts.whole():
            yield
            self._core.known_parameters.check()

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Export the dense model with the module's `save_pretrained`; without one, write its state dict to safetensors
        files. Collective; rank 0 writes.

        Args:
            folder: output folder. An older export in it is replaced: at any moment its weights are complete or absent.
            tokenizer: saved to the same folder.
            options: passed to the module's `save_pretrained`.
        """

        def write() -> None:
            is_divided = self.tensor_parallel.group is not None
            state = {"state_dict": self.module.state_dict()} if is_divided else {}  # a collective
            to = output_folder(folder, "folder")
            if dist.get_rank() == 0:
                save_pretrained(self.module, to, tokenizer, **state, **options)

        with self._core.dense_view.resident("save_pretrained"), self._state_dicts.whole():
            run_on_all_ranks(write, self._control)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As in DeepSpeed, for the dense model; collective."""
        save = super().save_16bit_model
        with self._core.dense_view.resident("save_16bit_model"), self._state_dicts.whole():
            run_on_all_ranks(lambda: save(save_dir, save_filename, exclude_frozen_parameters), self._control)
        return True

    def reestimate_batch_norm(self, batches: Iterable[Any], *, num_batches: int) -> int:
        """See `sdp_deepspeed.reestimate_batch_norm`."""
        if not (norms := tracking_norms(self.module)):
            return 0
        with unchanged_random_state(), self._core.dense_view.resident("reestimate_batch_norm"):  # may draw numbers
            estimate_on_all_ranks(self.module, batches, num_batches, self._core.groups)
        return len(norms)

    def release(self) -> frozenset[str]:
        """Turn the module into the dense model again, for another engine. Collective; ends this engine.

        Returns:
            Names of parameters that only the mask had frozen on this rank.
        """
        mask = self._core.mask
        frozen = frozenset(n for n, p in mask.parameters.items() if mask.trainable[n] and not p.requires_grad)
        self._core.require_subnetwork("deepspeed.initialize")
        self._core.close()
        self.optimizer.destroy()
        return frozen

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this rank stores, by dense name."""
        return self._core.held_tensors()
