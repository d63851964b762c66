"""Checkpoints of a sharded model, in the format of the DeepSpeed host's: what one saves, the other resumes.

The format, and what is guaranteed: ../checkpoint/README.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.state.trained_state import RankState
from sdp_deepspeed.config import KEY
from sdp_deepspeed.core.parallel.optimizer_kinds import is_elementwise
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import Channel
from sdp_deepspeed.distributed.monitored_barrier import Phase
from sdp_deepspeed.fsdp.local_chunks import LocalChunks
from sdp_deepspeed.fsdp.optimizer_chunks import ShardedOptimizerChunks
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, sharded_model_of
from sdp_deepspeed.plan.plan import Plan

logger = logging.getLogger("sdp_deepspeed")


class ShardedTraining:
    """A sharded model and its optimizer as checkpoints see them: a `TrainedState`.

    Args:
        sharded: the model.
        optimizer: of its parameters.
        lr_scheduler: None without one.
        world: all ranks.

    Attributes:
        global_steps: of the optimizer, since it was made; what is loaded goes on.
    """

    def __init__(
        self, sharded: ShardedModel, optimizer: torch.optim.Optimizer, lr_scheduler: Any, world: Communicator
    ) -> None:
        self.sharded = sharded
        self.module = sharded.module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = {KEY: sharded.block.model_dump(mode="json", exclude_unset=True)}
        self.world = world
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0

    @property
    def plan(self) -> Plan:
        return self.sharded.plan

    @property
    def tensor_parallel_layout(self) -> int | list[list[int]]:
        tensor_parallel = self.sharded.tensor_parallel
        return 1 if tensor_parallel is None else tensor_parallel.layout

    def rank_state(self) -> RankState:
        chunks = LocalChunks.of(self.sharded)
        return RankState(chunks, ShardedOptimizerChunks(self.optimizer, chunks))

    def check(self) -> None:
        """ValueError for what no checkpoint could hold: tensors or optimizers of others, or state of whole tensors."""
        ShardedOptimizerChunks(self.optimizer, LocalChunks.of(self.sharded)).check()

    def gradient_accumulation_steps(self) -> int:
        """The user's loop counts, not we."""
        return 1

    def before_restore(self, steps: int) -> None:
        """Nothing: the plan stays."""

    def before_checkpoint(self, call: str) -> None:
        """Meet all ranks, and leave evaluation.

        Raises:
            RuntimeError: a rank does not come, which is named; or it is inside of the dense view.
        """
        view = self.sharded.view
        if view.is_inside:  # where weights may be scaled
            raise RuntimeError(f"{call} inside sdp_deepspeed.fsdp.dense: leave it first, on all ranks")
        view.meet(Phase.SAVE if call == "save_checkpoint" else Phase.LOAD)

    def log_on_rank_0(self, text: str, level: int) -> None:
        if self.world.rank == 0:
            logger.log(level, text)


class CheckpointManager:
    """Checkpoints of a model that `sdp_deepspeed.fully_shard` returned; all ranks call each method, between steps.

    The block's `checkpoint` counts here too: `keep_last`, and `asynchronous`, with which saving returns when everything
    is copied to host memory.

    Args:
        model: sharded.
        optimizer: of its parameters; to be given before its first step, as its steps are counted from here on.
        lr_scheduler: what has a `state_dict` and a `load_state_dict`.

    Raises:
        ValueError: the model was not sharded by `sdp_deepspeed.fully_shard`, or the optimizer was made before that;
            at the first step, the optimizer's state is not one value for each element.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        sharded = sharded_model_of(model)
        world = Communicator(dist, objects=sharded.host.channel(Channel.WORLD))
        self._training = ShardedTraining(sharded, optimizer, lr_scheduler, world)
        self._training.check()
        options = sharded.block.checkpoint
        self._checkpointer = Checkpointer.build(self._training, sharded.host, options=options)
        self._is_checked = False  # its state, after the first step
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._training.global_steps += 1
        if not (self._is_checked or is_elementwise(type(self._training.optimizer).__name__)):
            self._is_checked = True
            self._training.check()  # now that it has state: at the first checkpoint hours would be lost

    @property
    def global_steps(self) -> int:
        """Steps of the optimizer so far, of the runs that this one resumes too; it names checkpoints without a tag."""
        return self._training.global_steps

    @property
    def global_samples(self) -> int:
        """Sequences so far, if the loop counts them here: DeepSpeed's monitors have them as their step."""
        return self._training.global_samples

    @global_samples.setter
    def global_samples(self, number: int) -> None:
        self._training.global_samples = number

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write the dense model in training, complete or not at all; it loads under any plan and number of ranks, here
        and in the DeepSpeed host, with or without tensor parallelism.

        Args:
            save_dir: folder of all checkpoints, which all ranks see.
            tag: its name there; None names the step.
            client_state: tensors, numbers, strings, lists and dicts that `load_checkpoint` returns; rank 0's is kept.
            save_latest: whether `latest` names it afterward.
            exclude_frozen_parameters: leave out parameters that needed no gradients.

        Raises:
            ValueError: on all ranks: client state that could not be loaded safely, or an optimizer whose state is not
                one value for each element.
            RuntimeError: on all ranks, if it cannot be written; earlier checkpoints are as they were. On those that
                wait, if a rank does not call it.
        """
        folder, exclude_frozen = Path(save_dir), exclude_frozen_parameters
        self._checkpointer.save(folder, tag, client_state or {}, latest=save_latest, exclude_frozen=exclude_frozen)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of this host or of the DeepSpeed host, whatever its layout. Gradients that
        wait in FSDP2 for the end of an accumulation are not dropped: load between steps.

        Args:
            load_dir: folder of all checkpoints.
            tag: None for the one that `latest` names, or the newest complete one.
            load_module_strict: the tensors must be those of the model, neither fewer nor more.
            load_optimizer_states, load_lr_scheduler_states: whether these go on too.
            load_module_only: nothing but the model.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed: it is damaged, or of another model, optimizer or LR
                scheduler.
        """
        options = LoadOptions(load_optimizer_states, load_lr_scheduler_states, load_module_only, load_module_strict)
        found = self._checkpointer.load(Path(load_dir), None if tag is None else str(tag), options)
        if found[0] is not None and load_lr_scheduler_states and not load_module_only:
            _fit_to_groups(self._training.lr_scheduler, self._training.optimizer.param_groups)
        return found

    def load_pretrained(self, folder: str | Path) -> None:
        """Start from a local folder in Hugging Face format (safetensors): every rank reads what it holds. The
        optimizer's moments, counters and the LR scheduler stay as they are.

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        self._checkpointer.load_pretrained(Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is written in the background is complete; all ranks call it, before they leave.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        self._checkpointer.wait()


def _fit_to_groups(lr_scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Have a scheduler of PyTorch's, and those that it is made of, keep what each param group of this rank has: the run
    that was saved may have divided its groups otherwise. Groups got their rates back by their parameters' names.
    """
    if hasattr(lr_scheduler, "base_lrs"):
        lr_scheduler.base_lrs = [group["initial_lr"] for group in groups]
    if hasattr(lr_scheduler, "_last_lr"):
        lr_scheduler._last_lr = [group["lr"] for group in groups]
    for inner in getattr(lr_scheduler, "_schedulers", ()):
        _fit_to_groups(inner, groups)
