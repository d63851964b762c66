"""The two exchanges of an optimizer, gradients to their owners and weights on their way back; how stages average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.averaging import Averaging, AveragingOptions
from sdp_deepspeed.exchange.backward_averaging import BackwardAveraging
from sdp_deepspeed.exchange.buffers import Buffers
from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.exchange.step_averaging import StepAveraging
from sdp_deepspeed.exchange.streams import streams_of
from sdp_deepspeed.layout.buckets import build_buckets, build_segments, default_bucket_elements
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED

_WAITING_BUCKETS = 4  # fewer free gradients of whole tensors earlier, with fewer owners that send at the same time


def build_exchanges(model: RankModel, dp_group: Communicator, settings: OptimizerSettings) -> tuple[Exchange, Exchange]:
    """For gradients and for weights: the same shards, perhaps in buckets of other sizes; else one exchange is both.
    What travels has the same memory, by turns.

    Args:
        model: its tensors have their param groups.
    """
    optimized = [info for info in model.tensors if info.group != NOT_OPTIMIZED]
    given = settings.bucket_elements, settings.return_bucket_elements
    default = default_bucket_elements(optimized, model.plan) if None in given else 0
    limits = [limit or default for limit in given]
    max_waiting = _WAITING_BUCKETS * min(limits) if settings.stage == 2 else math.inf  # before, nothing is freed early
    segments = build_segments(
        optimized, model.plan, max_elements=min(limits), nodes=model.nodes, max_waiting=max_waiting
    )
    device = next(iter(model.parameters().values())).device
    buffers = Buffers(device, streams_of(device, overlaps=settings.max_in_flight > 0))
    exchanges = {
        limit: Exchange(
            build_buckets(segments, model.nodes, max_elements=limit, all_receive_weights=model.stores_all),
            dp_group,
            model.nodes,
            device=device,
            dtype=settings.wire_dtype,
            buffers=buffers,
        )
        for limit in set(limits)
    }
    return exchanges[limits[0]], exchanges[limits[1]]


def build_averaging(
    exchange: Exchange,
    gradients: Gradients,
    options: AveragingOptions,
    *,
    settings: OptimizerSettings,
    parameters: Mapping[str, torch.nn.Parameter],
    needs_one_flat: Sequence[bool],
) -> Averaging:
    """As the stage says.

    Args:
        exchange: that of gradients.
        parameters: the module's, by dense name.
        needs_one_flat: of each param group, for `StepAveraging`.
    """
    if settings.stage < 2:
        keeps_flats = settings.stage == 1
        return StepAveraging(exchange, gradients, options, keeps_flats=keeps_flats, needs_one_flat=needs_one_flat)
    dtypes = {parameter.dtype for parameter in parameters.values()}
    has_one = len(dtypes) == 1 and not settings.accumulate_in_fp32
    dtype = dtypes.pop() if has_one else torch.float32
    dtype = torch.float32 if dtype == torch.float64 else dtype  # averages are fp32 at most, as at stage 1
    return BackwardAveraging(exchange, gradients, options, parameters=parameters, dtype=dtype)
