"""The dense model in place of a rank's subnetwork, for evaluation and export (DeepSpeed host; FSDP2's is
fsdp/dense_model.py).

In the forward regime, each slice that some rank lacks is sent by one of its holders to all data-parallel ranks; in the
backward regime every rank has all weights. The dense model stays resident until `end`, so ranks may then run
different numbers of batches, or parts of the model, without synchronization. It takes the memory of the dense weights,
as ZeRO-1 and 2 do all the time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from sdp_deepspeed.architectures.located_branch import trained_layers
from sdp_deepspeed.batch_norm import average_running_statistics, running_statistics
from sdp_deepspeed.masking.check import is_checkpointed
from sdp_deepspeed.masking.mask import is_masked, partial_tensors
from sdp_deepspeed.masking.placeholders import PartialTensor
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.parallel.call_barrier import CallBarrier
from sdp_deepspeed.parallel.dense_gathers import Segment, gather_segments
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 2**24  # per all-gather
_PARTIAL = (
    "this rank holds only a part, so the state dict is partial; use `with engine.dense():` on all ranks, "
    "engine.save_checkpoint or save_pretrained"
)
_COPIED = (
    "this module is a copy of a rank's subnetwork; copy the dense model instead: copy.deepcopy inside `with "
    "engine.dense():` on all ranks"
)


class DenseView:
    """Turns a masked module into the dense model, and back into the subnetwork.

    Args:
        optimizer: of the subnetwork; its shards are refreshed when the module is the subnetwork again.
        barrier: waited for before the first collective.
    """

    def __init__(self, optimizer: ShardedOptimizer, barrier: CallBarrier, device: torch.device) -> None:
        self.mask, self._groups, self._device = optimizer.mask, optimizer.groups, device
        self._optimizer, self._barrier = optimizer, barrier
        self._is_evaluating = False  # made resident by an evaluation, not by `resident()`
        self._handles: list[Any] = []
        self._has_warned = False
        self._install()

    @property
    def is_resident(self) -> bool:
        """Whether the module is currently the dense model."""
        return not self.mask.is_applied

    @property
    def is_collective(self) -> bool:
        """Whether making the model dense is a collective."""
        fetches = self.mask.plan.regime == "forward" and not self.mask.plan.is_dense
        return self._groups.data_parallel.size > 1 and (fetches or bool(running_statistics(self.mask)))

    # ---- entering and leaving -----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def make_resident(self, what: str = "the dense model") -> None:
        """Make the module the dense model. Collective, unless it is dense already."""
        if self.is_resident:
            return
        if self.is_collective:
            self._barrier.wait(what)
            average_running_statistics(self.mask, self._groups.data_parallel, self._device)
        self.mask.undo()
        if self.mask.plan.regime == "forward":
            self._fetch()

    @torch.no_grad()
    def end(self) -> None:
        """Make the module this rank's subnetwork again, with its current weights."""
        self._is_evaluating = False
        if self.is_resident:
            self.mask.check_shapes()
            self.mask.apply()
            self._optimizer.refresh_shards()

    @contextmanager
    def resident(self, what: str = "engine.dense") -> Iterator[None]:
        """Context in which the module is the dense model."""
        if self.is_resident and not self._is_evaluating:
            yield  # an outer context ends it
            return
        was_evaluating, self._is_evaluating = self._is_evaluating, False
        self.make_resident(what)
        try:
            yield
        finally:
            if was_evaluating:
                self._is_evaluating = True
            else:
                self.end()

    def end_evaluation(self) -> None:
        if self._is_evaluating:
            self.end()

    def _fetch(self) -> None:
        """Gather every slice that some rank lacks from one of its holders, in chunks."""
        group = self._groups.data_parallel
        limit = max(1, _CHUNK_ELEMENTS // group.size)  # per chunk and rank
        sent = [0] * group.size
        chunks: defaultdict[int, list[Segment]] = defaultdict(list)
        for pieces in (*self.mask.pieces.values(), *self.mask.buffer_pieces.values()):
            for piece, holders in pieces:
                if len(holders) < group.size:
                    rank = min(holders, key=sent.__getitem__)
                    values = self.mask.view(piece).data  # its own version: graphs of the subnetwork remain valid
                    for rows in _rows(values, limit):
                        chunks[sent[rank] // limit].append(Segment(rank, rows, self.mask.is_held(piece)))
                        sent[rank] += rows.numel()
        for _, segments in sorted(chunks.items()):
            gather_segments(segments, group)

    # ---- hooks --------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Install hooks: in evaluation the first forward pass without gradients, of the model or a module that contains
        a trained layer, makes it dense; state dicts of a subnetwork raise when used."""
        model = self.mask.model
        owned = WeakSet(model.get_submodule(name) for name in trained_layers(self.mask.branches))  # not copies
        view = self

        @torch.compiler.disable
        def enter(module: nn.Module) -> None:
            if is_checkpointed():
                return
            if not module.training and module not in owned:
                _refuse_evaluation(module)
            elif not module.training and not view.is_resident:
                view.make_resident("an evaluation")
                view._is_evaluating = True
            elif module.training and module in owned:
                view._warn()

        @torch.compiler.disable
        def leave(module: nn.Module) -> None:
            if module in owned:
                view.end_evaluation()

        def before_forward(module: nn.Module, _: Any) -> None:
            if torch.is_grad_enabled():
                if view._is_evaluating:
                    leave(module)
                elif module is model and not model.training and not view._has_warned and not view.is_resident:
                    view._warn()
            elif (not module.training or not view._has_warned) and (not view.is_resident or is_masked(module)):
                enter(module)

        if not self.mask.plan.is_dense or running_statistics(self.mask):
            self._handles += [module.register_forward_pre_hook(before_forward, prepend=True) for module in owned]
        if not self.mask.plan.is_dense:
            self._install_refusals(model)

    @torch.compiler.disable
    def _warn(self) -> None:
        self._has_warned = True
        if self.mask.plan.trains_subnetworks:
            logger.warning(
                "%s: this pass runs this rank's subnetwork; for the dense model use eval() and torch.no_grad()", KEY
            )

    def _install_refusals(self, model: nn.Module) -> None:
        view, owned = self, WeakSet(model.modules())

        def hide(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for attribute, name in partial_tensors(module).items():
                key = prefix + attribute
                if key in state and module in owned and view.mask.plan.regime == "backward":
                    state[key] = view.mask.joined(name)
                elif key in state:
                    state[key] = PartialTensor.of(f"{key}: {_PARTIAL if module in owned else _COPIED}")

        def refuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            names = [prefix + attribute for attribute in partial_tensors(module)]
            if any(name in state for name in names):
                raise RuntimeError(
                    f"load_state_dict: this rank has only a part of {names[0]}; load inside "
                    "`with engine.dense():` on all ranks, or into a copy that was made there"
                )

        for module in model.modules():
            if partial_tensors(module):
                self._handles.append(module.register_state_dict_post_hook(hide))
                self._handles.append(module.register_load_state_dict_pre_hook(refuse))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _rows(values: torch.Tensor, limit: int) -> Sequence[torch.Tensor]:
    """Views of at most `limit` elements each, or of one row."""
    if values.numel() <= limit:
        return [values]
    return values.split(max(1, limit * len(values) // values.numel()))


def _refuse_evaluation(copied: nn.Module) -> None:
    """Raise RuntimeError for a copy of a subnetwork, unless it has all weights."""
    if any(map(partial_tensors, copied.modules())):
        raise RuntimeError(f"evaluation: {_COPIED}")
