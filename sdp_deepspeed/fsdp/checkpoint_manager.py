"""Checkpoints of sharded models, in the format that both hosts share (`checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.checkpoint.export_and_import import load_pretrained
from sdp_deepspeed.checkpoint.optimizer_state import NUMBER, group_facts
from sdp_deepspeed.checkpoint.rank_state import RankState
from sdp_deepspeed.checkpoint.save_and_load import Checkpointer
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, sharded_model_of
from sdp_deepspeed.parallel.boxes import Box, local_of
from sdp_deepspeed.parallel.consistency import gather_objects, run_on_all_ranks
from sdp_deepspeed.parallel.optimizer_kinds import groups_of_whole_tensors, is_elementwise


class SteppedShards:
    """An optimizer over shards, in the form that checkpoints use. The constructor is collective.

    Attributes:
        param_groups: number of the param group of each trained parameter, by dense name.
        group_numbers: number of each param group of the optimizer; groups that `param_groups` has split by mesh share
            one.

    Raises:
        ValueError: on all ranks, if the optimizer has parameters that are not the model's.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self.sharded, self.optimizer = sharded, optimizer
        sharded.reshard()
        control = sharded.groups.control
        self.group_numbers = [group.get(NUMBER, index) for index, group in enumerate(optimizer.param_groups)]
        every: dict[str, int] = {}
        for of_rank in gather_objects(run_on_all_ranks(self._numbers_by_name, control), control):
            every |= of_rank
        self.param_group_of = {name: every[name] for name in sharded.parts if name in every}

    def _numbers_by_name(self) -> dict[str, int]:
        names = {id(self.sharded.parameter(part)): part.name for part in self.sharded.held_parts()}
        absent = {id(parameter) for parameter in self.sharded.module.parameters() if not parameter.numel()}
        result = {}
        for number, group in zip(self.group_numbers, self.optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                if id(parameter) in names and parameter.requires_grad:
                    result[names[id(parameter)]] = number
                elif id(parameter) not in names and id(parameter) not in absent:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the sharded "
                        "model's; create it after fully_shard"
                    )
        return result

    def boxes(self) -> list[Box]:
        """What this rank has of the parameters, trained or not."""
        sharded = self.sharded
        return [
            box
            for part in sharded.held_parts()
            for box in part.boxes(sharded.rank, sharded.parameter(part), is_stepped=part.name in self.param_group_of)
        ]

    def gather_weights(self) -> None:
        """Does nothing: the optimizer steps the weights themselves."""


@dataclass(frozen=True)
class ShardedState(RankState):
    """Model and optimizer state of one rank, for a sharded model."""

    optimizer: SteppedShards

    @property
    def model(self) -> nn.Module:
        return self.optimizer.sharded.dense.module  # of the original class, without wrappers

    def current_buffers(self) -> dict[str, torch.Tensor]:
        return {name: local_of(buffer) for name, buffer in self.optimizer.sharded.dense.current_buffers().items()}

    @property
    def group_numbers(self) -> list[int]:
        return self.optimizer.group_numbers

    def unstepped(self) -> dict[str, torch.Tensor]:
        return self.live_buffers()  # `boxes` of the optimizer has all parameters


def state_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> ShardedState:
    """Build the state of a sharded model; collective.

    Args:
        optimizer: None for the model alone.
    """
    if optimizer is None:
        sharded.reshard()
        optimizer = torch.optim.SGD([sharded.parameter(part) for part in sharded.held_parts()])
    return ShardedState(sharded.mask, SteppedShards(sharded, optimizer), sharded.groups, sharded.tensor_parallel_shards)


class CheckpointManager:
    """Saves and loads checkpoints of a model returned by `sdp_deepspeed.fully_shard`.

    All methods are collective, between steps. The options of the block's `checkpoint` apply. With `asynchronous`,
    `save_checkpoint` returns once the state has been copied to host memory.

    Args:
        optimizer: optimizer of its parameters, before its first step: steps are counted from here on.
        lr_scheduler: an object with `state_dict` and `load_state_dict`.

    Attributes:
        global_steps: number of optimizer steps, including those of resumed runs. Default tags contain it.

    Raises:
        ValueError: the model was not sharded by `sdp_deepspeed.fully_shard`, or the optimizer was created before that
            call; at the first step, if the optimizer's state does not have one value per element.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        self._sharded, self._optimizer, self._lr_scheduler = sharded_model_of(model), optimizer, lr_scheduler
        state_of(self._sharded, optimizer)  # raises if it does not fit
        run_on_all_ranks(lambda: _check_whole(self._sharded, optimizer), self._sharded.groups.control)
        self._checkpointer = Checkpointer(self._sharded.block.checkpoint)
        self.global_steps = 0
        self._is_checked = False
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.global_steps += 1
        if not (self._is_checked or is_elementwise(type(self._optimizer).__name__)):
            self._is_checked = True
            group_facts(state_of(self._sharded, self._optimizer))  # fail now, not hours later at the first checkpoint

    def _state(self, call: str) -> ShardedState:
        self._sharded.barrier.wait(call)
        self._sharded.average_statistics()
        return state_of(self._sharded, self._optimizer)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Save the dense model and the training state, atomically.

        The checkpoint loads under any plan and number of ranks, with FSDP2 or DeepSpeed, with or without tensor
        parallelism.

        Args:
            save_dir: folder of all checkpoints, shared by all ranks.
            tag: name of this checkpoint. Default: the step.
            client_state: tensors, numbers, strings, lists and dicts that `load_checkpoint` returns. Rank 0's is saved.
            exclude_frozen_parameters: whether to leave out parameters that do not require gradients.

        Raises:
            ValueError: on all ranks, if there is no folder, the client state has types that cannot be loaded safely,
                or the optimizer's state does not have one value per element.
            RuntimeError: on all ranks, if the checkpoint cannot be written; earlier ones are intact. On the waiting
                ranks, if a rank does not call it.
        """
        state = self._state("save_checkpoint")
        self._checkpointer.save(
            save_dir,
            tag,
            state,
            {"global_steps": self.global_steps, "global_samples": 0, "skipped_steps": 0},
            lr_scheduler=self._lr_scheduler,
            client_state=client_state,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that FSDP2 or DeepSpeed saved with any layout. Call it between steps: accumulated gradients
        are kept.

        Args:
            load_dir: folder of all checkpoints.
            tag: name of the checkpoint. Default: the one in `latest`, or the newest complete one.
            load_module_strict: whether missing and unexpected tensors are errors.
            load_optimizer_states, load_lr_scheduler_states: whether to load the state of the optimizer and of the
                scheduler.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed, if the checkpoint is damaged, or of a different model,
                optimizer or LR scheduler.
        """
        state = self._state("load_checkpoint")
        scheduler = self._lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        control = state.groups.control
        checkpoint = self._checkpointer.find(load_dir, tag, control, lr_scheduler=scheduler)
        if checkpoint is None:
            return None, None
        self._checkpointer.restore(
            checkpoint,
            state,
            optimizer_states=load_optimizer_states and not load_module_only,
            own_state=not load_module_only,
            strict=load_module_strict,
        )
        common = checkpoint.facts["common"]
        if not load_module_only:
            self.global_steps = common["counters"]["global_steps"]
            stored = common["lr_scheduler"]
            if scheduler is not None and stored is not None:
                run_on_all_ranks(lambda: scheduler.load_state_dict(stored), control)
                _fit_to_groups(scheduler, self._optimizer.param_groups)
        return str(checkpoint.path), common["client_state"]

    def load_pretrained(self, folder: str | Path) -> None:
        """Load weights from a local folder in Hugging Face format (safetensors); each rank reads what it holds.
        Moments, counters and the LR scheduler are unchanged.

        Raises:
            ValueError: on all ranks, before anything is changed, if files are missing, damaged, or of a different
                model.
        """
        load_pretrained(self._state("load_pretrained"), Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous checkpoint is complete. Call it before the program exits.

        Raises:
            RuntimeError: on all ranks, if the checkpoint could not be written.
        """
        self._checkpointer.wait()


def _check_whole(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer of whole tensors (Muon) if tensors are split by neurons or heads."""
    is_divided = any(part.dim is not None for parts in sharded.parts.values() for part in parts)
    if is_divided and groups_of_whole_tensors(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} updates whole matrices, but ranks hold neurons or heads of them; use "
            'the strategy "block", or an optimizer such as AdamW'
        )


def _fit_to_groups(lr_scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Adapt the state of a PyTorch scheduler, and of nested ones, to the param groups of this rank.

    The saved run may have had other groups. The groups' own learning rates have been restored by parameter names.
    """
    if hasattr(lr_scheduler, "base_lrs"):
        lr_scheduler.base_lrs = [group["initial_lr"] for group in groups]
    if hasattr(lr_scheduler, "_last_lr"):
        lr_scheduler._last_lr = [group["lr"] for group in groups]
    for inner in getattr(lr_scheduler, "_schedulers", ()):
        _fit_to_groups(inner, groups)
