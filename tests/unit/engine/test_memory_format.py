"""What DeepSpeed broadcasts lies row-major, and goes back."""

from __future__ import annotations

import torch
from torch import nn

from sdp_deepspeed.engine.memory_format import row_major


def test_parameters_are_row_major_for_a_while() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2), nn.Conv2d(3, 4, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strides, expected = model[0].weight.stride(), model[0].weight.detach() + 1
    with row_major(model.parameters()):
        assert all(parameter.is_contiguous() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.data.view(torch.uint8)
        model[0].weight.data += 1
    assert model[0].weight.stride() == strides
    assert torch.equal(model[0].weight, expected)
