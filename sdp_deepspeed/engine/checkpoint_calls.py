"""DeepSpeed's calls for checkpoints, and ours beside them, handed to the engine's `Checkpointer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from sdp_deepspeed.checkpoint.load import LoadOptions

if TYPE_CHECKING:
    from sdp_deepspeed.engine.host_engine import HostEngine as DeepSpeedEngine  # what mypy follows
else:
    from deepspeed.runtime.engine import DeepSpeedEngine


class CheckpointCalls(DeepSpeedEngine):
    """The part of `SubnetworkEngine` that users call for checkpoints.

    Attributes:
        checkpointer: set at the end of the engine's constructor.
    """

    checkpointer: Checkpointer

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
        folder, exclude_frozen = Path(save_dir), exclude_frozen_parameters
        self.checkpointer.save(folder, tag, client_state or {}, latest=save_latest, exclude_frozen=exclude_frozen)
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
        options = LoadOptions(load_optimizer_states, load_lr_scheduler_states, load_module_only, load_module_strict)
        return self.checkpointer.load(Path(load_dir), None if tag is None else str(tag), options)

    def load_pretrained(self, folder: str | Path) -> None:
        """Start from a local folder in Hugging Face format (safetensors); every rank calls it and reads what it holds.
        The optimizer's moments, counters and the LR scheduler stay as they are.

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        self.checkpointer.load_pretrained(Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is written in the background is complete; all ranks call it, before they leave.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        if "checkpointer" in vars(self):  # not where the constructor failed
            self.checkpointer.wait()

    def destroy(self) -> None:
        """As DeepSpeed's, after waiting for a checkpoint that is being written."""
        try:
            self.wait_for_checkpoint()
        finally:
            super().destroy()
