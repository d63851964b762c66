"""Estimates of FSDP2's ranks, by hand; ranks/estimate has them beside what two ranks hold and send."""

from __future__ import annotations

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.estimate.deepspeed_bytes import RankEstimate
from sdp_deepspeed.estimate.fsdp2_bytes import FSDP2Setup, fsdp2_estimate, fsdp2_tensors
from sdp_deepspeed.fsdp.fsdp_groups import gathered_together
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.models import llama, parsed

# Ranks 0 and 1 share a matrix of 3 x 5, ranks 0 to 2 a table of 7 x 2; rank 2 alone has the second matrix.
TENSORS = [TensorInfo("table", (7, 2), "f"), TensorInfo("a.w", (3, 5), "f"), TensorInfo("b.w", (4, 5), "f")]
PLAN = Plan(
    "forward",
    "block",
    3,
    0,
    (Unit("a", (Piece("a.w", None, 0, 15),)), Unit("b", (Piece("b.w", None, 0, 20),))),
    ((0, 1), (2,)),
    (0, 1, 2),
)


def estimates(
    plan: Plan, tensors: list[TensorInfo], setup: FSDP2Setup, branches: list[LocatedBranch] | None = None
) -> list[RankEstimate]:
    """Of each rank."""
    parts = list(fsdp2_tensors(plan, tensors, branches or ()))
    return [fsdp2_estimate(parts, setup, rank) for rank in plan.all_ranks]


def test_each_ranks_shards_and_their_padding() -> None:
    setup = FSDP2Setup(compute=2, wire=2, accumulation=3)
    first, second, third = estimates(PLAN, TENSORS, setup)
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
    first, *_ = estimates(PLAN, tensors, FSDP2Setup())
    assert first.gradients == 4 * 6
    assert first.sent == 4 * (12 + 12 + 2 * 10)
    assert first.weights == 4 * 16


def test_holder_sets_of_neurons_are_gathered_at_the_same_time() -> None:
    """Each rank holds three of four groups of two rows each, as parts that are nested around one forward pass."""
    pieces = [Piece("a.w", 0, 2 * number, 2) for number in range(4)]
    units = tuple(Unit(f"a.group_{number}", (piece,)) for number, piece in enumerate(pieces))
    holders = ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3))
    plan = Plan("forward", "neuron", 4, 0, units, holders, (0, 1, 2, 3))
    first, *_ = estimates(plan, [TensorInfo("a.w", (8, 4), "f")], FSDP2Setup())
    padded = 3 * (3 * 1 * 4)  # of three sets three ranks store one row each
    assert first.gathered_units == 4 * padded + 8 * padded


def test_groups_of_layers_that_are_gathered_together_overlap() -> None:
    """Two layers, with attention as blocks, are one range: a rank may have all it holds of them at once."""
    model = llama(2)
    block = parsed(strategy={"attention": "block", "mlp": "neuron"}, coverage=0.5, seed=2)
    branches = proven_branches(model, "neuron")
    plan, _ = plan_model(model, block, 4, branches=branches)
    tensors = dense_tensors(model)
    assert len({*gathered_together(plan, tensors, branches).values()}) == 1
    shapes = {info.name: info.shape for info in tensors}
    for rank, estimate in enumerate(estimates(plan, tensors, FSDP2Setup(), branches)):
        held = [unit for index, unit in enumerate(plan.units) if plan.holds_rank(index, rank)]
        elements = sum(piece.num_elements(shapes[piece.parameter]) for unit in held for piece in unit.pieces)
        assert elements <= estimate.gathered_units / (4 + 8) <= 1.2 * elements  # with padding
