"""Parameters that somebody replaced are noticed, and while the model is dense their values are taken over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.masking.replaced import KnownParameters, ReplaceableTensors


def build() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU())
    model[2].bias = model[0].bias
    return model


def _tied_at_one_place(model: Any) -> None:
    model[2].bias = nn.Parameter(torch.ones(3))


def _frozen(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)


def _module(model: Any) -> None:
    model[2] = nn.Linear(3, 3)


def _around(model: Any) -> None:
    model[0] = nn.Sequential(model[0], nn.Linear(3, 3))


def _assigned(model: Any) -> None:
    model[1].load_state_dict(nn.BatchNorm1d(3).state_dict(), assign=True)


def _by_a_tensor(model: Any) -> None:
    weight = model[0].weight
    del model[0].weight
    model[0].weight = weight.detach().clone()


def _deleted(model: Any) -> None:
    del model[0].weight


def _by_none(model: Any) -> None:
    model[2].bias = None  # its other place stays


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_by_a_tensor, "'0.weight'"),
        (_deleted, "'0.weight'"),
        (_by_none, "'2.bias'"),
        (_tied_at_one_place, "'2.bias'"),
        (_frozen, "'0.weight'"),
        (_module, "'2.weight', '2.bias'"),
        (_around, "'0.1.weight', '0.1.bias'"),
        (_assigned, "'1.weight', '1.bias'"),
    ],
)
def test_other_parameters_are_named(change: Any, names: str) -> None:
    model = build()
    known = KnownParameters(model)
    known.check()
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{names}\. Copy values into the first ones"):
            known.check()


def test_the_same_parameters_elsewhere_are_no_others() -> None:
    """Values, flags, wrapped modules, and modules without Parameters may change."""
    model = build()
    known = KnownParameters(model)
    model[0].weight.data = torch.ones(3, 3)
    model[0].requires_grad_(False)
    known.check()
    model[3] = nn.Identity()
    known.check()
    model[0] = nn.Sequential(model[0])
    known.check()
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.ReLU())
    known.check()
    del model[2]
    known.check()
    _around(model)
    with pytest.raises(RuntimeError, match=r"'0\.1\.weight'"):
        known.check()


def test_values_are_taken_over() -> None:
    model, other = build(), build()
    other[2].bias = nn.Parameter(torch.ones(3))
    nn.init.uniform_(other[1].running_mean)
    before = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    replaceable = ReplaceableTensors(model)
    state = other.state_dict()
    del state["2.bias"]
    model.load_state_dict(state, assign=True, strict=False)
    assert model[0].weight is not before["0.weight"]
    assert replaceable.put_back() is None
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert replaceable.put_back() is None


def test_what_has_no_such_values_is_named() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replaceable = ReplaceableTensors(model)
    model[0].weight = nn.Parameter(torch.ones(2, 3))
    model[0].bias = nn.Parameter(torch.ones(3, device="meta"))
    model[2].weight = None
    error = replaceable.put_back()
    assert error is not None
    assert "'0.weight' ((2, 3) on cpu for (3, 3) on cpu), '0.bias' ((3,) on meta" in str(error)
    assert "'2.weight' (nothing for (3, 3) on cpu)" in str(error)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
