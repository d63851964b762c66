"""The dense model under FSDP2: in evaluation each lacking unit comes to every rank just before it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from sdp_deepspeed.config import KEY
from sdp_deepspeed.core.checkpoint.random_state import unchanged_random_state
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import Channel, make_host_group
from sdp_deepspeed.distributed.host_words import HostWords
from sdp_deepspeed.distributed.last_acts import make_last_acts
from sdp_deepspeed.distributed.monitored_barrier import make_monitored_barrier
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.piece_fetcher import PartFetcher
from sdp_deepspeed.fsdp.sharded_mask import ShardedBlockPart
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, sharded_model_of
from sdp_deepspeed.fsdp.state_dicts import show_as_lacking
from sdp_deepspeed.masking.batch_norm import RunningStatistics
from sdp_deepspeed.masking.dense_view import DenseView
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.masking.passes import DensePasses
from sdp_deepspeed.masking.reestimation import Reestimation
from sdp_deepspeed.units import Piece

logger = logging.getLogger("sdp_deepspeed")
_SAVE = "sdp_deepspeed.fsdp.save_pretrained"
_WORDS = HostWords(
    view="sdp_deepspeed.fsdp.dense(model)",
    alone=f"write the model with {_SAVE}, and load it there",
    save=_SAVE,
    differentiate="",
    inner="",
    order="run the model's own forward pass, the same on all ranks",
)


class ShardedView(DenseView):
    """What is whole is never in the module at once: parameters are shards."""

    def _refuse_partial(self, part: MaskedPart) -> list[Any]:
        return show_as_lacking(part) if isinstance(part, ShardedBlockPart) else []  # pieces: neuron.SumModule

    def _make_resident(self) -> None:
        if not self._mask.parts:  # every rank holds everything, and FSDP2 gathers it
            self._mode = "resident"
            return
        raise RuntimeError(
            "a state dict or a copy of a sharded model has this rank's shards only: call "
            "sdp_deepspeed.fsdp.full_state_dict(model) or save_pretrained(model, folder), on every rank"
        )


@contextmanager
def dense(module: nn.Module) -> Iterator[None]:
    """Context in which every forward pass is the dense model's: in evaluation mode and without gradients, or it raises.
    All ranks enter and leave together, and run the same number of forward passes.

    Args:
        module: that `fully_shard` returned.
    """
    with sharded_model_of(module).view():
        yield


def reestimate_batch_norm(module: nn.Module, batches: Iterable[Any], *, num_batches: int) -> int:
    """As `sdp_deepspeed.reestimate_batch_norm`.

    Args:
        module: that `fully_shard` returned.
    """
    sharded = sharded_model_of(module)
    reestimation = Reestimation(module, sharded.view, sharded.host.channel(Channel.WORLD), _log_on_rank_0)
    with unchanged_random_state():
        return reestimation.run(batches, num_batches)


def install_view(sharded: ShardedModel, device: torch.device, policy: MixedPrecisionPolicy) -> None:
    """Have forward passes in evaluation mode without gradients mean the dense model; every rank calls it."""
    host = sharded.host = make_host_group(dist, Communicator(dist), logger.warning)
    objects = host.channel(Channel.DATA_PARALLEL, sharded.mesh.mesh.tolist())
    last_acts = make_last_acts(dist, sharded.mesh.get_group(), logger.warning)
    dp_group = Communicator(dist, sharded.mesh.get_group(), objects=objects, last_acts=last_acts)
    barrier = make_monitored_barrier(host, last_acts, logger.warning, _WORDS)
    mask = sharded.mask
    units = {unit.name: unit for unit in sharded.units}
    for part in mask.parts:
        if isinstance(part, ShardedBlockPart):
            part.join(units[part.name], policy.param_dtype, casts_inputs=policy.cast_forward_inputs)
        elif isinstance(part, SplitBranch):
            part.join(device, policy)
    tensors = {tensor.name: tensor for tensor in sharded.held_tensors()}

    def read(piece: Piece) -> torch.Tensor:
        if piece.kind == "buffer":
            return _buffer(sharded, piece)
        return sharded.local(tensors[piece.parameter]).to(device)

    sharded.fetcher = PartFetcher(mask.model, mask.parts, dp_group, read, device=device)
    stored = partial(_local_buffer, sharded)
    statistics = RunningStatistics(sharded.module, mask.model, dp_group, device=device, stored=stored)
    passes = DensePasses(mask, sharded.fetcher, barrier, device=device, report=_log_on_rank_0, statistics=statistics)
    sharded.view = ShardedView(sharded.module, mask, dp_group, barrier, passes)
    sharded.view.install()
    sharded.module.register_forward_hook(torch.compiler.disable(lambda *_: _free(sharded)))
    if statistics.norms and not mask.parts:
        sharded.module.register_forward_pre_hook(torch.compiler.disable(AverageFirst(statistics)))


class AverageFirst:
    """Before the first evaluation after training, where all ranks hold everything: there the view has nothing to do,
    but a forward pass is a collective of all ranks all the same, FSDP2's own."""

    def __init__(self, statistics: RunningStatistics) -> None:
        self._statistics = statistics
        self._has_trained = False

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._has_trained and not module.training:
            self._statistics.average()
        self._has_trained = module.training


def _buffer(sharded: ShardedModel, piece: Piece) -> torch.Tensor:
    path, _, name = piece.parameter.rpartition(".")
    buffer: torch.Tensor = getattr(sharded.module.get_submodule(path), name)  # also where a wrapper was put on since
    return buffer.detach()


def _local_buffer(sharded: ShardedModel, piece: Piece) -> torch.Tensor:
    buffer: Any = _buffer(sharded, piece)
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _log_on_rank_0(text: str) -> Any:
    if dist.get_rank() == 0:
        logger.info("%s: %s", KEY, text)


def _free(sharded: ShardedModel) -> None:
    """FSDP2 keeps what is shared gathered after a forward pass, as backward frees it. Without a backward pass an
    optimizer that is made now, clipping, and the next pass after a step would take the copies for the weights."""
    if not torch.is_grad_enabled():
        sharded.reshard()
