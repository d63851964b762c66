"""What an optimizer of whole tensors keeps for each, as it is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.checkpoint.state.whole_state import new_whole_state, whole_state
from sdp_deepspeed.units import Piece

PIECE = Piece("scale", None, 0, 1)


def test_moments_of_a_number_have_its_dense_shape() -> None:
    """Its optimizer steps a tensor of the shape [1], so that a moment does not look like a step count; what resumes the
    checkpoint may step each element. What is not like the tensor stays as it is."""
    tensor = nn.Parameter(torch.ones(1))
    group: Any = SimpleNamespace(fragments=[SimpleNamespace(piece=PIECE)], tensors=[tensor])
    rank_chunks: Any = SimpleNamespace(shape=lambda name: ())
    state = {tensor: {"exp_avg": torch.full((1,), 3.0), "rows": torch.zeros(2)}}
    written = whole_state(group, state, {PIECE}, rank_chunks)
    assert {key: tuple(chunks.shape) for key, chunks in written.items()} == {"exp_avg/scale": (), "rows/scale": (2,)}
    stored = {key: SimpleNamespace(size=chunks.shape, properties=chunks) for key, chunks in written.items()}
    targets, (own,) = new_whole_state(group, stored, rank_chunks)
    assert {key: tuple(chunks.shape) for key, chunks in targets.items()} == {"exp_avg/scale": (), "rows/scale": (2,)}
    assert {key: tuple(value.shape) for key, value in own.items()} == {"exp_avg": (1,), "rows": (2,)}
