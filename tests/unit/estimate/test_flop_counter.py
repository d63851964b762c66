"""FLOPs against products that a person can count, without a change of what is computed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sdp_deepspeed.estimate.flop_counter import FlopCounter
from tests.helpers.core_masks import tokens
from tests.helpers.models import llama, loss_of


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_of_groups(kind: type[nn.Module], groups: int) -> None:
    """[4, 6, 9, 9] to [4, 12, 4, 4], or to [4, 12, 19, 19]: each weight once for each position of the smaller side."""
    layer, image = kind(6, 12, 3, stride=2, groups=groups), torch.ones(4, 6, 9, 9, requires_grad=True)
    positions = 4 * (4 * 4 if kind is nn.Conv2d else 9 * 9)
    with FlopCounter() as counter:
        layer(image).sum().backward()
    assert counter.total == 3 * 2 * positions * (6 * 12 * 9 // groups)
    with FlopCounter() as without_gradient_of_the_input:
        layer(image.detach()).sum().backward()
    assert without_gradient_of_the_input.total == 2 * 2 * positions * (6 * 12 * 9 // groups)


def test_what_is_computed_stays_the_same() -> None:
    """Bit for bit: under PyTorch's own counter nearly all of these gradients are others."""
    model = llama(4)
    gradients = []
    for context in (nullcontext(), FlopCounter()):
        model.zero_grad()
        with context:
            loss_of(model, tokens()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
