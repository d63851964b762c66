"""Writing the dense model from a live engine: a collective, in which an error of one rank is raised on all."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.utils import log_dist

from sdp_deepspeed.atomic_files import added_when_complete
from sdp_deepspeed.checkpoint.interop.hugging_face_names import new_model
from sdp_deepspeed.config import KEY
from sdp_deepspeed.distributed.agreement import raise_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.engine.apply_plan import AppliedPlan
from sdp_deepspeed.masking.mixins import Mixin, mixed_in


@dataclass(frozen=True)
class DenseExport:
    """Writes what every rank has a part of.

    Args:
        module: this rank's subnetwork.
        applied: what makes it dense.
        world: all ranks.
        resident: enters the dense model as a whole (`engine.dense(resident=True)`).
    """

    module: Any  # an nn.Module; its `save_pretrained` is Transformers'
    applied: AppliedPlan
    world: Communicator
    resident: Callable[[], AbstractContextManager[None]]

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """As `SubnetworkEngine.save_pretrained`."""

        named = {"repo_id": Path(folder).name} if options.get("push_to_hub") else {}  # not as the staging folder

        def write() -> None:
            state = self.applied.parallel.state_dict(self.module)
            if self.world.rank == 0:
                with new_model(Path(folder), variant=options.get("variant")) as staging:
                    self.module.save_pretrained(str(staging), **state, **(named | options))
                    if tokenizer is not None:
                        tokenizer.save_pretrained(str(staging))

        self.run(write, f"save_pretrained: cannot write {folder}")

    def save_by_itself(self, save: Callable[..., Any], *args: Any, **options: Any) -> None:
        """The module's own `save_pretrained`, of the dense model. In the forward regime all ranks call it; which of
        them writes is for the arguments to say, as in a plain module.

        Args:
            save: the plain module's.
        """
        given = inspect.signature(save).bind(*args, **options).arguments
        state = options.get("state_dict", given.get("state_dict"))  # where `save` only takes **kwargs, too
        if self.applied.dense_view.is_whole or state is not None:  # somebody has made it whole
            save(*args, **options)
        elif not self.applied.dense_view.is_collective:
            with self.resident():
                save(*args, **options)
        else:
            self.run(lambda: save(*args, **options), f"save_pretrained: cannot write {args[0] if args else given}")

    def save_as_built(self, save: Callable[[str], object], folder: str, file: str) -> None:
        """Have DeepSpeed write `file`, with parameters that require gradients where they did before units were dropped
        or frozen.

        Args:
            save: writes to a folder; on ranks other than 0 nothing.
        """

        def write() -> None:
            with ExitStack() as context:
                context.enter_context(self.applied.mask.trainable_as_built())
                target = Path(folder)
                if self.world.rank == 0:
                    complete = added_when_complete(target, last=file, replaces=lambda _: False)
                    target = context.enter_context(complete)
                save(str(target))

        self.run(write, f"save_16bit_model: cannot write {folder}")

    def run(self, write: Callable[[], None], failure: str) -> None:
        """Run `write` on every rank in the dense model.

        Raises:
            RuntimeError: on all ranks, `failure` and the error of the first rank that has one.
        """
        error: Exception | None = None
        self.applied.dense_view.wait_to_write()
        self.applied.statistics.warn_of_subnetworks(_warn, "engine.reestimate_batch_norm(batches, num_batches=...)")
        with self.resident():
            try:
                write()
            except Exception as problem:  # of any kind: the others wait for this rank
                error = RuntimeError(f"{failure}: {problem}")
            raise_on_all_ranks(self.world, error)  # here, where no barrier's shorter time limit runs


def _warn(text: str) -> None:
    log_dist(f"{KEY}: {text}", ranks=[0], level=logging.WARNING)


class _SavesDenseModel(Mixin):
    """Mixed in before the class of a module that has a `save_pretrained`, which hosts call on all ranks."""

    _sdp_export: DenseExport

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        inherited: Any = super()
        self._sdp_export.save_by_itself(inherited.save_pretrained, *args, **options)


def install_save(export: DenseExport) -> None:
    """Have the module's own `save_pretrained`, if it has one, mean the dense model; called once."""
    if export.applied.mask.parts and callable(getattr(export.module, "save_pretrained", None)):
        export.module.__class__ = mixed_in(_SavesDenseModel, type(export.module))
        object.__setattr__(export.module, "_sdp_export", export)
