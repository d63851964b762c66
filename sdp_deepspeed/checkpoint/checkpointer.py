"""Saves and loads the dense model of an engine, on any layout: what stands behind DeepSpeed's calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sdp_deepspeed.checkpoint.interop.pretrained import load_pretrained
from sdp_deepspeed.checkpoint.load import LoadOptions, num_steps, restore, select_checkpoint
from sdp_deepspeed.checkpoint.save import Saver, Target
from sdp_deepspeed.checkpoint.state.snapshot import Snapshot, step_counts, take_snapshot
from sdp_deepspeed.checkpoint.state.trained_state import TrainedState
from sdp_deepspeed.checkpoint.storage.errors import translating_os_errors
from sdp_deepspeed.checkpoint.storage.folder import check_tag
from sdp_deepspeed.config import CheckpointOptions
from sdp_deepspeed.distributed.agreement import run_on_all_ranks, run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import HostGroup
from sdp_deepspeed.messages import quoted


class Checkpointer:
    """Checkpoints of one engine; all ranks call each method.

    Args:
        trained: the engine.
        saver: of all ranks.
        options: the block's `checkpoint`.
    """

    def __init__(self, trained: TrainedState, *, saver: Saver, options: CheckpointOptions) -> None:
        self._trained = trained
        self._saver = saver
        self._options = options

    @classmethod
    def build(cls, trained: TrainedState, host: HostGroup, *, options: CheckpointOptions) -> Checkpointer:
        """
        Args:
            host: its collectives are the checkpointer's, which may work while others communicate.
        """
        report = partial(trained.log_on_rank_0, level=logging.ERROR)
        saver = Saver(Communicator(host.dist, host.group), host.group, report)
        return cls(trained, saver=saver, options=options)

    def save(
        self,
        folder: Path,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        latest: bool = True,
        exclude_frozen: bool = False,
    ) -> None:
        """Write a checkpoint; if saving is asynchronous, return when everything is copied to host memory.

        Args:
            folder: of all checkpoints.
            tag: None for one that names the step.
            latest: whether `latest` names it afterward.
            exclude_frozen: leave out parameters that need no gradients.

        Raises:
            ValueError: on all ranks: client state that could not be loaded safely, or tags that are none or differ.
            RuntimeError: on all ranks, if it cannot be written; earlier checkpoints are as they were. On those that
                wait, if a rank does not call it.
        """
        self._trained.before_checkpoint("save_checkpoint")
        name = str(tag) if tag is not None else f"global_step{self._trained.global_steps}"
        tags = sorted(set(self._trained.world.gather_objects(name)))
        if len(tags) > 1:
            raise ValueError(f"save_checkpoint: ranks gave different tags ({quoted(tags)}); give one to all")
        check_tag(name)  # of all ranks or of none
        self._saver.wait()  # before anything is copied: there is memory for one snapshot
        snapshot = self._snapshot(client_state, exclude_frozen=exclude_frozen)
        target = Target(folder, name, latest=latest, keep_last=self._options.keep_last)
        if self._options.asynchronous:
            self._saver.save_behind(snapshot, target)
        else:
            self._saver.save(snapshot, target)

    def _snapshot(self, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> Snapshot:
        trained, world = self._trained, self._trained.world
        counts = run_on_all_ranks(world, translating_os_errors(partial(step_counts, trained)))
        counts_of_ranks = world.gather_objects(counts)
        take = partial(take_snapshot, trained, client_state, counts_of_ranks, exclude_frozen=exclude_frozen)
        return run_on_all_ranks(world, translating_os_errors(take))

    def load(self, folder: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        """Restore a checkpoint of any layout.

        Args:
            folder: of all checkpoints.
            tag: None for the one that `latest` names, or the newest complete one.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `folder` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed: it is damaged, or of another model.
        """
        trained = self._trained
        trained.before_checkpoint("load_checkpoint")
        self.wait()
        name, warnings = select_checkpoint(folder, tag, trained.world)
        for warning in warnings:
            trained.log_on_rank_0(warning, logging.WARNING)
        if name is None:
            text = f"load_checkpoint: {folder} has no checkpoint, so nothing was loaded"
            trained.log_on_rank_0(text, logging.WARNING)
            return None, None
        if not options.module_only:
            trained.before_restore(run_on_rank_0(trained.world, partial(num_steps, folder / name)))
        return str(folder / name), restore(trained, folder / name, options)

    def load_pretrained(self, folder: Path) -> None:
        """Fill weights and masters from a local folder in Hugging Face format (safetensors).

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        self._trained.before_checkpoint("load_pretrained")
        load_pretrained(self._trained, folder)

    def wait(self) -> None:
        """Until a checkpoint that is written in the background is complete.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        self._saver.wait()
