"""benchmarks/compare.py: the fewest bytes by hand, and losses that differ are an error."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.bounds import elements_of_plan
from benchmarks.common.contestants import DDP, Contestant
from benchmarks.common.traffic_counter import sent_bytes
from benchmarks.compare import check_losses
from sdp_deepspeed.config import MODES
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit

SHAPES = {"a": (3, 4), "b": (2, 4)}


def plan_of(regime: Any) -> Plan:
    """Four ranks; a unit of 12 elements on three of them, one of 4 (half of a tensor) on one; 4 more are shared."""
    units = (
        Unit("a", (Piece("a", None, 0, 12),)),
        Unit("b", (Piece("b", 0, 0, 1), Piece("buffer", 0, 0, 1, "buffer"))),
    )
    return Plan(regime, "block", 4, None, 0, units, ((0, 1, 2), (3,)), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("regime", "last_layer", "of_a", "of_b"),
    [
        # a's gradient: 8 elements to the two other owners; back: the 4 that a rank owns, to two others
        ("forward", "", 8 + 8, 0),
        ("backward", "", 8 + 12, 12),  # back to all three other ranks; b's only holder has nothing to average
        ("forward", "b", 8 + 2 * 8, 0),  # over FSDP2 weights are gathered twice
        ("forward", "a", 8 + 8, 0),  # but for the last layer's
    ],
)
def test_fewest_elements_of_a_plan(regime: str, last_layer: str, of_a: float, of_b: float) -> None:
    found = [elements_of_plan(plan_of(regime), SHAPES, rank, last_layer=last_layer) for rank in range(4)]
    shared = 3 + 3
    assert found == pytest.approx([of_a + shared] * 3 + [of_b + shared])


@pytest.mark.parametrize("loss", [1.0001, float("nan")])
def test_contestants_that_train_the_same_must_have_equal_losses(loss: float) -> None:
    whole, half, other = (Contestant(1, MODES[0], 1.0), Contestant(1, MODES[0], 0.5), Contestant(2, MODES[0], 0.5))
    held = {row.name: [{"losses": [3.0, 1.0]}] for row in (DDP, whole, half, other)}
    held[half.name] = held[other.name] = [{"losses": [2.0, 5.0]}]  # a subnetwork's loss is its own
    check_losses([DDP, whole, half, other], held)
    with pytest.raises(RuntimeError, match="C=1 does not train what DDP does"):
        check_losses([DDP, whole], held | {whole.name: [{"losses": [3.0, loss]}]})


def test_unknown_collectives_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'new_collective_'.*sent_bytes"):
        sent_bytes("new_collective_", {}, 2, 0)
