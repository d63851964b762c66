"""The two exchanges of an optimizer: gradients to their owners, and weights on their way back."""

from __future__ import annotations

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.buffers import Buffers
from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.exchange.streams import streams_of
from sdp_deepspeed.layout.buckets import build_buckets, build_segments, default_bucket_elements
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED


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
    segments = build_segments(optimized, model.plan, max_elements=min(limits), nodes=model.nodes)
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
