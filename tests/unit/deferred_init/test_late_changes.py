"""What is done to a model between the end of `Init` and `deepspeed.initialize` counts as if it was built for real."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.deferred_init.materialize import DeferredModel
from tests.helpers.deferred_models import values_of

Model = Any  # an nn.Sequential, whose modules mypy does not know


def build() -> Model:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(5, 4, padding_idx=1))


def _applied(model: Model) -> None:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            module.bias.data[1:].fill_(3)
        if isinstance(module, nn.Embedding):
            nn.init.xavier_uniform_(module.weight)

    model.apply(initialize)


@torch.no_grad()
def _by_its_own_values(model: Model) -> None:
    twice = model[0].weight * 2
    twice += 1
    model[0].weight.copy_(twice)
    model[1].running_mean += model[0].weight.sum(0)


def _loaded(model: Model) -> None:
    model.load_state_dict({name: torch.full_like(value, 3) for name, value in build_real().state_dict().items()})


def _of_a_copy(model: Model) -> None:
    other = deepcopy(model)
    nn.init.ones_(other[0].weight)
    nn.init.zeros_(other[1].running_var)
    with torch.no_grad():
        model[0].weight[2:] = other[0].weight[:2]
        model[1].running_var.copy_(other[1].running_var)


def _replaced(model: Model) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def _cast(model: Model) -> None:
    model.bfloat16()


def _seeded(model: Model) -> None:
    torch.manual_seed(8)
    nn.init.orthogonal_(model[0].weight)


def build_real() -> Model:
    torch.manual_seed(3)
    return build()


def build_deferred() -> Any:
    torch.manual_seed(3)
    with sdp_deepspeed.Init() as program:
        model = build()
    return model, program


@pytest.mark.parametrize(
    "change", [_applied, _by_its_own_values, _loaded, _of_a_copy, _replaced, _cast, _seeded], ids=lambda f: f.__name__
)
def test_it_is_as_if_built_for_real(change: Callable[[Model], None]) -> None:
    expected = build_real()
    untouched = {name: value.clone() for name, value in expected.state_dict().items()}
    change(expected)
    model, program = build_deferred()
    change(model)
    assert DeferredModel.of(model) is not None
    found = values_of(model, program)
    values = expected.state_dict()
    assert [name for name in values if not torch.equal(found[name], values[name])] == []
    assert any(not torch.equal(untouched[name], values[name]) for name in values), "it changes nothing"
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}


def test_tensors_that_somebody_only_looks_at_stay_as_they_are() -> None:
    expected, (model, program) = build_real(), build_deferred()
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert "meta" in repr(parameter)
        assert parameter.numel() == parameter.nelement() > 0
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    DeferredModel.of(model)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    found = values_of(model, program)
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.named_parameters())


def test_replaced_by_real_ones() -> None:
    """All of them, so that nothing is left to be made."""
    model, _ = build_deferred()
    real = build_real().state_dict()
    model.load_state_dict(real, assign=True)
    assert DeferredModel.of(model) is None
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, real[name])] == []


def test_what_has_other_values_than_it_will_have_can_be_shown() -> None:
    """A constant that is changed at random, as it is now: PyTorch writes its text with all modes switched off."""
    with sdp_deepspeed.Init() as program:
        model: Any = nn.Linear(2, 2)
        model.register_buffer("table", torch.tensor([1.5, 2.5]).uniform_())
    count = len(program.operations)
    assert "[1.5000, 2.5000]" in repr(model.table)
    assert "meta" in f"{model.weight}"
    assert len(program.operations) == count


def test_values_cannot_be_read() -> None:
    model, _ = build_deferred()
    for read in (lambda: model[0].weight.sum().item(), lambda: nn.init.trunc_normal_(model[0].weight)):
        with pytest.raises(RuntimeError, match=r"by the value of a tensor .*trunc_normal_ belongs inside Init"):
            read()
