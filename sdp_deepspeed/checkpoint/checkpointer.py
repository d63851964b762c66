"""What DeepSpeed's engine calls `save_checkpoint` and `load_checkpoint`, for the dense model on any layout."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.interop.load_universal import load_universal, universal_tag
from sdp_deepspeed.checkpoint.interop.pretrained import load_pretrained
from sdp_deepspeed.checkpoint.load import What, choose, restore
from sdp_deepspeed.checkpoint.save import Saver, Target, together
from sdp_deepspeed.checkpoint.state.optimizer_state import merged
from sdp_deepspeed.checkpoint.state.rank_chunks import Layout
from sdp_deepspeed.checkpoint.state.snapshot import step_counts, take
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import Shards


class CheckpointingEngine(DeepSpeedEngine):
    """Saves and loads; what it saves is the subclass's."""

    block: SubnetworkConfig
    dp_group: Communicator
    world: Communicator
    optimizer: SubnetworkOptimizer
    _saver: Saver | None = None

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """Who holds what."""

    @property
    @abstractmethod
    def shards(self) -> Shards:
        """What this rank stores under tensor parallelism."""

    @abstractmethod
    def layout(self) -> Layout:
        """Where this rank's parameters and persistent buffers lie in the dense model."""

    @abstractmethod
    def before_checkpoint(self, call: str) -> None:
        """Leave evaluation; RuntimeError where the dense model is resident."""

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
            RuntimeError: on all ranks, if it cannot be written; earlier checkpoints are as they were.
        """
        self.before_checkpoint("save_checkpoint")
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        target = Target(Path(save_dir), name, latest=save_latest, keep_last=self.block.checkpoint.keep_last)
        self._save(target, client_state or {}, exclude_frozen=exclude_frozen_parameters)
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
        """As DeepSpeed's, on the layout that wrote it or on another one; all ranks call it.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed: it is damaged, or of another model.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint: custom_load_fn is not supported; load with load_module_strict=False")
        self.before_checkpoint("load_checkpoint")
        what = What(load_optimizer_states, load_lr_scheduler_states, load_module_only, load_module_strict)
        return self._load(Path(load_dir), None if tag is None else str(tag), what)

    def load_pretrained(self, folder: str | Path) -> None:
        """Start from a local folder in Hugging Face format (safetensors); every rank calls it and reads what it holds.
        The optimizer's moments, counters and the LR scheduler stay as they are.

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        self.before_checkpoint("load_pretrained")
        load_pretrained(self, Path(folder))

    def _make_saver(self) -> None:
        """All ranks call it at start: a rank that is lost while a group is made leaves the others waiting for it."""
        group = dist.new_group(backend="gloo")  # of its own, on the host: it may work while others communicate
        self._saver = Saver(Communicator(dist, group), group)

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is written behind the training is complete; all ranks call it, before they leave.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def destroy(self) -> None:
        """As DeepSpeed's, after waiting for a checkpoint that is being written."""
        try:
            self.wait_for_checkpoint()
        finally:
            super().destroy()

    def _save(self, target: Target, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> None:
        tags = self.world.gather_objects(target.tag)
        if len(set(tags)) > 1:
            raise ValueError(f"save_checkpoint: ranks gave different tags ({sorted(set(tags))[:5]}); give one to all")
        files.check_tag(target.tag)  # of all ranks or of none
        assert self._saver is not None, "made at the end of the constructor"
        self._saver.wait()  # before anything is copied: there is memory for one snapshot
        counts = merged(self.world.gather_objects(together(self.world, lambda: step_counts(self))))
        snapshot = together(self.world, lambda: take(self, client_state, counts, exclude_frozen=exclude_frozen))
        if self.block.checkpoint.asynchronous:
            self._saver.save_behind(snapshot, target)
        else:
            self._saver.save(snapshot, target)

    def _load(self, folder: Path, tag: str | None, what: What) -> tuple[str | None, dict[str, Any] | None]:
        self.wait_for_checkpoint()
        if self.load_universal_checkpoint():
            universal = together(self.world, lambda: universal_tag(folder, tag))
            if universal is not None:
                return str(folder / universal), load_universal(self, folder / universal, what)
        name, warnings = choose(folder, tag, self.world)
        for warning in warnings:
            log_dist(warning, ranks=[0], level=logging.WARNING)
        if name is None:
            log_dist(f"load_checkpoint: {folder} has no checkpoint, so nothing was loaded", [0], level=logging.WARNING)
            return None, None
        return str(folder / name), restore(self, folder / name, what)
