"""FLOPs against products that a person can count, without a change of what is computed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sdp_deepspeed.estimate.flops import FlopCounter
from tests.helpers.core_masks import tokens
from tests.helpers.models import llama, loss_of


def test_a_product_forward_and_backward() -> None:
    one, other = torch.ones(2, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    with FlopCounter() as counter:
        (one @ other).sum().backward()
    assert counter.total == 3 * 2 * (2 * 3 * 5)


def test_attention_on_a_cpu() -> None:
    """Two products of [4, 8] by [8, 4] for each of 2 x 3 heads."""
    query = torch.ones(2, 3, 4, 8)
    with FlopCounter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert counter.total == 2 * 3 * 2 * (2 * 4 * 4 * 8)


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


def test_matrices_as_pytorch_counts_them() -> None:
    with FlopCounterMode(display=False) as theirs:
        loss_of(llama(), tokens()).backward()
    counts = theirs.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    attention = 2 * 2 * 2 * 4 * 4 * tokens().shape[1] ** 2 * tokens().shape[0]
    with FlopCounter() as ours:
        loss_of(llama(), tokens()).backward()
    assert ours.total == products + attention * 7 // 2


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
