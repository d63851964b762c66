"""Pieces of the dense tensors, and who holds them."""

from __future__ import annotations

import torch

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece, Unit


def test_replicas_hold_what_their_subnetwork_holds() -> None:
    units = tuple(Unit(name, (Piece(name, None, 0, 4),)) for name in ("a", "b"))
    plan = Plan("forward", "block", 2, 1, 0, units, ((1,), (0,)), (0, 1, 0, 1))
    info = TensorInfo("a", (4,), torch.float32)
    assert pieces_by_tensor([info], plan)["parameter", "a"] == [(Piece("a", None, 0, 4), (1, 3))]


def test_the_rest_of_a_sliced_tensor_is_shared() -> None:
    units = (Unit("u", (Piece("w", 1, 2, 3),)), Unit("v", (Piece("w", 1, 7, 1),)))
    plan = Plan("forward", "block", 2, 1, 0, units, ((0,), (1,)), (0, 1))
    pieces = pieces_by_tensor([TensorInfo("w", (2, 9), torch.float32)], plan)["parameter", "w"]
    assert pieces == [
        (Piece("w", 1, 0, 2), (0, 1)),
        (Piece("w", 1, 2, 3), (0,)),
        (Piece("w", 1, 5, 2), (0, 1)),
        (Piece("w", 1, 7, 1), (1,)),
        (Piece("w", 1, 8, 1), (0, 1)),
    ]


def test_a_sliced_tensor_that_everybody_holds_is_whole() -> None:
    """Nobody stores it cut then; gaps between the slices make no difference, one slice that somebody lacks does."""
    info, everyone = TensorInfo("w", (2, 9), torch.float32), (0, 1)
    units = (Unit("u", (Piece("w", 1, 2, 3),)), Unit("v", (Piece("w", 1, 7, 1),)))
    plan = Plan("forward", "block", 2, 2, 0, units, (everyone, everyone), everyone)
    assert pieces_by_tensor([info], plan) == {("parameter", "w"): [(Piece("w", None, 0, 18), everyone)]}
