"""Nothing whose shape is known: it can be given another, as layers do that cut their input into windows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sdp_deepspeed.masking.nothing import Nothing

NOTHING: Any = Nothing("layers.0.mlp")
SHAPED: Any = NOTHING.like(torch.empty(2, 6, 4, dtype=torch.float64, device="meta"))
REFUSAL = r"layers\.0\.mlp: this rank lacks the branch.*another shape.*must be a submodule.*`after`"


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.view(2, 3, 2, 4),
        lambda x: x.view((4, -1)),
        lambda x: x.reshape(-1, 8),
        lambda x: x.reshape(shape=(3, 16)),
        lambda x: torch.reshape(x, (12, 4)),
        lambda x: x.transpose(1, 2).contiguous().view(2, -1),
        lambda x: torch.transpose(x, 0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: torch.permute(x, (0, 2, 1)),
        lambda x: torch.movedim(x, 0, 2),
        lambda x: torch.roll(x, shifts=(1, 2), dims=(1, 2)),
        lambda x: x.roll(1, 0),
        lambda x: x.flip(0),
        lambda x: x.flatten(1),
        lambda x: torch.flatten(x, 1),
        lambda x: x.flatten(1).unflatten(1, (6, 4)),
        lambda x: x.unsqueeze(1).expand(2, 3, 6, 4),
        lambda x: x[:, :1].squeeze(1),
        lambda x: x.narrow(1, 2, 3),
        lambda x: x[:, 1:3, ..., :2],
        lambda x: x[1:],
        lambda x: x[:, 0],
        lambda x: x[None],
        lambda x: nn.Flatten()(x),
        lambda x: F.relu(x.transpose(0, 1)) * torch.ones(4, dtype=torch.float64),
        lambda x: F.dropout(-x / 2, training=True)[:, :2],
        lambda x: x.to(torch.float16),
        lambda x: x.to(torch.zeros(1, dtype=torch.bfloat16, device="meta")),
        lambda x: x.float().view(48),
        lambda x: x.bfloat16(),
        lambda x: x.type(torch.float32),
    ],
)
def test_another_shape_is_that_of_a_tensor(use: Callable[[Any], Any]) -> None:
    """Which is nothing as well, and says the same of itself."""
    found, expected = use(SHAPED), use(torch.zeros(2, 6, 4, dtype=torch.float64))
    assert isinstance(found, Nothing)
    shaped: Any = found
    assert (shaped.shape, shaped.dtype) == (expected.shape, expected.dtype)
    assert (shaped.size(), shaped.size(-1), shaped.ndim) == (expected.size(), expected.size(-1), expected.ndim)
    assert (shaped.dim(), shaped.numel(), shaped.device) == (expected.dim(), expected.numel(), torch.device("meta"))
    assert expected + shaped is expected


def test_shapes_that_do_not_fit_are_errors_of_pytorch() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size 48"):
        SHAPED.view(5, -1)


def test_the_device_is_the_one_that_it_was_moved_to() -> None:
    assert SHAPED.to("cpu").device == SHAPED.to(device=torch.device("cpu")).device == torch.device("cpu")
    assert SHAPED.to("cpu", torch.float16).dtype == torch.float16
    assert SHAPED.like("no tensor") is SHAPED


def test_nothing_keeps_no_tensor() -> None:
    tensor = torch.ones(3)
    alive, nothing = weakref.ref(tensor), NOTHING.like(tensor)
    del tensor
    assert alive() is None
    assert nothing.shape == (3,)


def test_copies_of_shapes() -> None:
    nothing: Any = Nothing("layers.0.mlp", copies=True).like(torch.ones(3))
    tensor = torch.ones(3)
    for shaped in (nothing, nothing.view(1, 3)[0:], nothing.half()):
        assert tensor + shaped is not tensor


@pytest.mark.parametrize("dropped", [0.3, 0.0])
def test_drop_path_as_it_is_usually_written(dropped: float) -> None:
    """By the number of dimensions, for all of a row; it draws as in the dense model."""

    def drop_path(x: Any) -> Any:
        kept = 1 - dropped
        random = kept + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        random.floor_()
        return x.div(kept) * random

    x = torch.randn(2, 3, 4)
    torch.manual_seed(1)
    expected = x + drop_path(torch.zeros_like(x))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert x + drop_path(NOTHING.like(x)) is x
    assert torch.equal(expected, x)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.view(48).tanh(),
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.layer_norm(x.view(2, -1), (24,)),
        lambda x: x.exp(),
        lambda x: x.clone(),
        lambda x: x.sum(),
        lambda x: x.stride(),
        lambda x: torch.cat([x, x]),
        lambda x: x.split(2),
        lambda x: x[0],
        lambda x: torch.ones(2, 6, 4).view_as(x),
        lambda x: x.copy_(x),
        lambda x: x.__setitem__(slice(0, 1), 0),
        lambda x: F.pad(x, (0, 1), value=1.0),
    ],
)
def test_with_a_shape_too_it_can_only_be_moved(use: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, RuntimeError), match=REFUSAL):
        use(SHAPED)


def test_tuples_still_are_told_from_tensors() -> None:
    for use in (lambda: [*SHAPED], lambda: SHAPED[0], lambda: len(SHAPED)):
        with pytest.raises(TypeError, match=r"this rank lacks the branch.*tuple needs `num_outputs`"):
            use()
