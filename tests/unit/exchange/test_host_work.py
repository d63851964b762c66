"""What the host does in a step follows buckets, holder sets and fragments, not fragments times peers."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sdp_deepspeed.distributed.communicator import Communicator, Done
from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.layout.buckets import Bucket, build_buckets, build_segments
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.random_layouts import views_of

META = torch.device("meta")
K, NUM_UNITS, LENGTH = 4, 800, 64
FRAGMENTS = NUM_UNITS // 2  # that one rank holds, at C = 1/2


class Nobody:
    """The functions of `torch.distributed` that an exchange calls, of a group in which nobody else is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return self.size

    def all_to_all_single(self, *arguments: Any, **options: Any) -> Done:
        return Done()


class Calls(TorchFunctionMode):
    """Counts calls of PyTorch's functions: views, copies, launches."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") != "__get__"  # a shape or a device costs nothing worth counting
        return func(*args, **(kwargs or {}))


def bucket_of(num_ranks: int, nodes: Nodes) -> Bucket:
    """Units with one of four holder sets, all in one bucket."""
    tensors = [TensorInfo(f"u{i}", (LENGTH,), torch.bfloat16, 0) for i in range(NUM_UNITS)]
    units = tuple(Unit(info.name, (Piece(info.name, None, 0, LENGTH),)) for info in tensors)
    holders = tuple(tuple(sorted((i % K, (i + 1) % K))) for i in range(NUM_UNITS))
    plan = Plan("forward", "block", K, 2, 0, units, holders, tuple(rank * K // num_ranks for rank in range(num_ranks)))
    segments = build_segments(tensors, plan, max_elements=10**9, nodes=nodes)
    (bucket,) = build_buckets(segments, nodes, max_elements=10**9)
    return bucket


def calls_of_a_step(num_ranks: int, per_node: int) -> int:
    """Of one bucket there and back, the second time."""
    nodes = Nodes.of([rank // per_node for rank in range(num_ranks)])
    bucket = bucket_of(num_ranks, nodes)
    exchange = Exchange([bucket], Communicator(Nobody(num_ranks)), nodes, device=META, dtype=torch.bfloat16)
    values = views_of({f"u{i}": torch.empty(LENGTH, dtype=torch.bfloat16, device=META) for i in range(NUM_UNITS)})
    for _ in range(2):
        averages = [
            torch.empty(sum(fragment.num_elements for fragment in shard), device=META)
            for _, shard in exchange.owned(bucket)
        ]
        with Calls() as calls:
            for steps in (exchange.reduce(bucket, values, averages), exchange.distribute(bucket, values)):
                assert all(step is None for step in steps)
    return calls.count


def test_views_do_not_grow_with_fragments_times_peers() -> None:
    """What goes to seven neighbors and three nodes is read once: more peers add calls per segment, not per fragment."""
    few, many = calls_of_a_step(4, 4), calls_of_a_step(32, 8)
    assert few <= 5 * FRAGMENTS
    assert many - few <= FRAGMENTS
