"""Estimates of FSDP2's ranks, by hand; ranks/fsdp/test_options.py has them beside what two ranks hold and send."""

from __future__ import annotations

from sdp_deepspeed.estimate.sharded import ShardedSetup, estimate_sharded
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit

# Ranks 0 and 1 share a matrix of 3 x 5, ranks 0 to 2 a table of 7 x 2; rank 2 alone has the second matrix.
TENSORS = [TensorInfo("table", (7, 2), "f"), TensorInfo("a.w", (3, 5), "f"), TensorInfo("b.w", (4, 5), "f")]
PLAN = Plan(
    "forward",
    "block",
    3,
    None,
    0,
    (Unit("a", (Piece("a.w", None, 0, 15),)), Unit("b", (Piece("b.w", None, 0, 20),))),
    ((0, 1), (2,)),
    (0, 1, 2),
)


def test_each_ranks_shards_and_their_padding() -> None:
    setup = ShardedSetup(compute=2, wire=2, accumulation=3)
    first, second, third = estimate_sharded(PLAN, TENSORS, setup)
    table, a, b = 3 * 2, 2 * 5, 4 * 5  # of 7 rows three ranks store 3 each, of 3 two store 2
    assert [each.weights for each in (first, second, third)] == [4 * (table + a), 4 * (table + a), 4 * (table + b)]
    assert first.gradients == first.weights
    assert [each.optimizer for each in (first, second, third)] == [8 * (6 + 10), 8 * (6 + 5), 8 * (2 + 20)]
    reduced, gathered = table * 2 + a, table * 2 + 2 * a  # units are gathered twice
    assert first.sent == 3 * 2 * (reduced + gathered)
    assert third.sent == 3 * 2 * (table * 2 + table * 2)  # nobody else has b
    assert first.gathered == 2 * table * 3
    assert first.gathered_units == 2 * a * 2 + 4 * a * 2


def test_frozen_weights_have_no_gradients() -> None:
    tensors = [TENSORS[0], TensorInfo("a.w", (3, 5), "f", trainable=False), TENSORS[2]]
    first, *_ = estimate_sharded(PLAN, tensors, ShardedSetup())
    assert first.gradients == 4 * 6
    assert first.sent == 4 * (12 + 12 + 2 * 10)
    assert first.weights == 4 * 16
