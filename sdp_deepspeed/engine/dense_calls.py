"""Where the engine's module is the dense model: the context, evaluation, export, and what is refused inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from torch import nn

from sdp_deepspeed.checkpoint.state import random_state
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.monitored_barrier import Phase
from sdp_deepspeed.engine import half_way
from sdp_deepspeed.engine.apply_plan import AppliedPlan, log_in_block
from sdp_deepspeed.engine.checkpoint_calls import CheckpointCalls
from sdp_deepspeed.engine.dense_export import DenseExport
from sdp_deepspeed.masking.other_weights import OtherWeights
from sdp_deepspeed.masking.reestimation import Reestimation
from sdp_deepspeed.masking.replaced import KnownParameters
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer


class DenseCalls(CheckpointCalls):
    """The part of `SubnetworkEngine` that users call for the dense model.

    Attributes:
        world: all ranks; more than the data-parallel group under tensor parallelism.
    """

    world: Communicator
    optimizer: SubnetworkOptimizer
    _applied: AppliedPlan
    _known_parameters: KnownParameters
    _other_weights: OtherWeights
    _is_half_replanned = False

    def train(self, mode: bool = True) -> Self:
        """As DeepSpeed's; going back to training ends an evaluation of the dense model on all ranks."""
        if mode:
            self._applied.dense_view.end_evaluation()
        super().train(mode)
        return self

    @contextmanager
    def dense(self, *, resident: bool | None = None, weights: nn.Module | None = None) -> Iterator[None]:
        """Context in which the module is the dense model; all ranks enter and leave together.

        Args:
            resident: True holds the whole model at once (generation, state dict). For gradients of the dense model
                use `torch.autograd.grad`. The next step starts from the weights as they are left; of a Parameter that
                was replaced (`load_state_dict(..., assign=True)`) the values are taken, and the first object stays.
                False fetches each lacking part while the one before it runs and frees it after, which takes the memory
                of the subnetwork plus two parts. By default what was fetched stays for the next forward pass where
                memory allows (`evaluation` in the block), to the same results.
            weights: those of this copy (`copy.deepcopy(engine.module)`, made outside of `dense`) in place of the
                module's: an average of weights. Not in the backward regime with neurons.

        Raises:
            ValueError: `weights` is no such copy.
            RuntimeError: on all ranks, naming ranks, when they do not do the same inside; naming tensors, when they
                were replaced by others of another shape.
        """
        self._refuse_half_replanned("engine.dense")
        view = self._applied.dense_view
        if weights is not None:
            self._refuse_resident("engine.dense(weights=...)")
            with self._other_weights.shown(weights), self.dense(resident=resident):
                yield
            return
        try:
            with view(resident=resident), self._applied.parallel.whole_state_dicts():
                try:
                    yield
                finally:
                    resident = resident or view.is_whole  # a state dict makes it so
        finally:
            is_own = not (view.is_whole or self._other_weights.are_shown)  # an outer view may scale them
            if resident and is_own:
                self.optimizer.refresh_fp32_params()

    def load_module_state_dict(self, *args: Any, **options: Any) -> None:
        """As DeepSpeed's; the next step starts from these weights."""
        self._refuse_other_weights("load_module_state_dict")
        super().load_module_state_dict(*args, **options)
        self.optimizer.refresh_fp32_params()

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Write the dense model in Hugging Face format, complete or not at all; all ranks call it, rank 0 writes.

        Args:
            tokenizer: saved beside the model if given.
            options: of the model's own `save_pretrained`, such as `max_shard_size`.
        """
        self._export().save_pretrained(folder, tokenizer, **options)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's, of the dense model."""
        save = super().save_16bit_model
        self._export().save_as_built(
            lambda folder: save(folder, save_filename, exclude_frozen_parameters), save_dir, save_filename
        )
        return True

    def reestimate_batch_norm(self, batches: Iterable[Any], *, num_batches: int) -> int:
        """As `sdp_deepspeed.reestimate_batch_norm`, of this engine's dense model."""
        self._refuse_half_replanned("engine.reestimate_batch_norm")
        engine = cast(nn.Module, self)
        reestimation = Reestimation(engine, self._applied.dense_view, self.world, log_in_block)
        with random_state.unchanged():
            return reestimation.run(batches, num_batches)

    def _export(self) -> DenseExport:
        return DenseExport(self.module, self._applied, self.world, partial(self.dense, resident=True))

    def _refuse_half_replanned(self, call: str) -> None:
        if self._is_half_replanned:
            half_way.refuse(call)

    def _refuse_resident(self, call: str) -> None:
        self._refuse_half_replanned(call)
        if self._applied.dense_view.is_resident:
            raise RuntimeError(f"{call} inside engine.dense(resident=True): leave it first, on all ranks")
        self._refuse_other_weights(call)

    def _refuse_other_weights(self, call: str) -> None:
        if self._other_weights.are_shown:
            raise RuntimeError(f"{call} inside engine.dense(weights=...): leave it first, on all ranks")

    def before_checkpoint(self, call: str) -> None:
        """Meet all ranks, and leave evaluation; RuntimeError if one does not come, the dense model is resident, or
        Parameters are others than at start."""
        self._refuse_resident(call)
        self._known_parameters.check()
        self._applied.dense_view.meet(Phase.SAVE if call == "save_checkpoint" else Phase.LOAD)
