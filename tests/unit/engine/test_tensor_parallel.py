"""What AutoTP may divide."""

from __future__ import annotations

import pytest
from torch import nn

from sdp_deepspeed.architectures import Branch, LocatedBranch
from sdp_deepspeed.engine.tensor_parallel import _check_divided
from sdp_deepspeed.plan.tensor_parallel_shards import Division
from sdp_deepspeed.units import Piece


def test_a_layer_that_gathers_its_output_may_be_divided() -> None:
    """Phi-3's gates and ups, which are one matrix, and queries of OLMo 2 before a norm."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 4)))
    name = "0.0.weight"
    branch = LocatedBranch("0", Branch("mlp", body="0"), (Piece(name, None, 0, 4),), uncuttable_reason="one matrix")
    divided = {name: Division((8, 2), 0, (4, 4))}
    with pytest.raises(ValueError, match=r"AutoTP would change what '0\.mlp' computes: one matrix"):
        _check_divided(model, [branch], divided)
    model[0][0].gather_output = True  # type: ignore[index]
    _check_divided(model, [branch], divided)
