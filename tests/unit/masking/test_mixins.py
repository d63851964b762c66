"""A copy of a masked module is a plain module with the weights of that moment, and leaves the original alone."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.masking.mixins import (
    CUT,
    Hook,
    Mixin,
    PartialTensor,
    RefusePartial,
    is_cut,
    mixed_in,
    no_hook,
    unmixed,
)
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Unit
from tests.helpers.dense_views import assert_refused_in_use
from tests.helpers.masked_modules import infos
from tests.helpers.models import llama, loss_of
from tests.helpers.rank_models import mask_of


class _One(Mixin):
    _sdp_view: Any

    def forward(self, x: Any) -> Any:
        return super().forward(x) + 1


class _Two(_One):
    pass


class _Owned(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self)(self.in_features, self.out_features)
        memo[id(self)] = copied
        copied.load_state_dict(self.state_dict())
        vars(copied)["_sdp_view"] = deepcopy(vars(self)["_sdp_view"], memo)
        return copied


class _Uncopyable:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("what leads back is not copied")


@pytest.mark.parametrize("kind", [nn.Linear, _Owned])
def test_a_copy_is_plain(kind: type[nn.Linear]) -> None:
    module: Any = kind(2, 2)
    for mixin in (_One, _Two):
        module.__class__ = mixed_in(mixin, type(module))
    object.__setattr__(module, "_sdp_view", _Uncopyable())
    seen: list[Any] = []
    module.register_forward_pre_hook(Hook(lambda *_: seen.append("hook")))
    module(torch.ones(1, 2))
    parent = nn.Sequential(module, nn.ReLU())
    parent.add_module("again", module)
    copied = deepcopy(parent)
    assert copied[0] is copied[2]
    assert type(copied[0]) is kind is unmixed(type(module))
    assert not hasattr(copied[0], "_sdp_view")
    assert torch.equal(copied[0].weight, module.weight)
    assert copied[0].weight is not module.weight
    assert torch.equal(copied[0](torch.ones(1, 2)) + 1, module(torch.ones(1, 2)))
    assert seen == ["hook"] * 2
    assert type(pickle.loads(pickle.dumps(copied))[0]) is kind


def test_a_partial_copy_stays_partial() -> None:
    dense = False
    refuse = RefusePartial("the part", lambda: dense, "Do it otherwise.")

    def state_after(hook: Any) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        module.register_buffer("seen", torch.zeros(1), persistent=False)
        state = {**module.state_dict(prefix="a."), "b.weight": torch.ones(1)}
        hook(module, state, "a.", {})
        assert torch.equal(state["b.weight"], torch.ones(1))
        assert state.keys() == {"a.weight", "a.bias", "b.weight"}
        return state

    assert_refused_in_use(state_after(refuse), r"not hold all of the part, .* partial\. Do it otherwise", PartialTensor)
    partial_copy = deepcopy(refuse)
    dense = True
    assert not any(isinstance(value, PartialTensor) for value in state_after(refuse).values())
    for hook in (partial_copy, deepcopy(partial_copy)):
        assert_refused_in_use(state_after(hook), r"partial\. It is a copy of a subnetwork", PartialTensor)
    assert deepcopy(refuse) is no_hook


def test_a_partial_tensor_can_be_shown_and_no_more() -> None:
    """Debuggers and logs print it; whatever reads it gets the reason."""
    tensor = PartialTensor.of("this is why")
    assert repr(tensor) == f"{tensor!r}" == "<this is why>"
    reads: list[Any] = [float, bool, list, len, np.asarray, copy, pickle.dumps, nn.Parameter, torch.Tensor.numel]
    reads += [lambda value: value + 1, lambda value: torch.ones(1) + value, lambda value: value.dtype]
    reads += [lambda value: nn.Linear(2, 2, bias=False).load_state_dict({"weight": value})]
    for read in reads:
        with pytest.raises(RuntimeError, match="this is why"):
            read(tensor)


def plan_of(model: nn.Module, regime: str, strategy: str) -> Plan:
    units: list[Unit] = []
    for branch in locate_branches(model):
        halves = [branch.pieces]
        if strategy == "neuron":
            count = branch.num_cells // 2
            halves = [branch.pieces_of_cells(range(count)), branch.pieces_of_cells(range(count, 2 * count))]
        for pieces in halves:
            units.append(Unit(f"{branch.name}.{len(units)}", pieces))
    holders = tuple((index % 2,) for index in range(len(units)))
    return Plan(regime, strategy, 2, 1, 0, tuple(units), holders, (0, 1))


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_a_copy_of_a_subnetwork_is_that_subnetwork(strategy: str) -> None:
    """Its loss and its gradients; it is marked as cut, and training the original does not reach it."""
    model, batch = llama(), torch.zeros(1, 4, dtype=torch.long)
    mask_of(model, locate_branches(model), infos(model), plan_of(model, "forward", strategy), 0)
    copied = deepcopy(model)
    assert is_cut(copied)
    loss = loss_of(model, batch)
    assert torch.equal(loss_of(copied, batch), loss)
    loss.backward()
    assert all(parameter.grad is None for parameter in copied.parameters())
    with torch.no_grad():
        model.get_parameter("lm_head.weight").zero_()
    assert torch.equal(loss_of(copied, batch), loss)
    assert not torch.equal(loss_of(model, batch), loss)


def test_a_copy_in_the_backward_regime_has_the_held_neurons() -> None:
    model, narrow, batch = llama(), llama(), torch.zeros(1, 4, dtype=torch.long)
    for each, regime in ((model, "backward"), (narrow, "forward")):
        mask_of(each, locate_branches(each), infos(each), plan_of(each, regime, "neuron"), 0)
    copied = deepcopy(model)
    assert torch.equal(loss_of(copied, batch), loss_of(narrow, batch))
    assert not torch.equal(loss_of(copied, batch), loss_of(model, batch))


def test_modules_that_are_not_whole_everywhere_are_marked() -> None:
    """On every rank alike, so that all refuse; what wraps the model, or is inside of it, is noticed too."""
    marked = []
    for rank in range(2):
        model: Any = llama()
        mask_of(model, locate_branches(model), infos(model), plan_of(model, "backward", "block"), rank)
        marked.append([name for name, module in model.named_modules() if CUT in vars(module)])
        assert is_cut(nn.Sequential(model))
        assert is_cut(model.model.layers[0])
        assert not is_cut(model.lm_head)
    assert marked[0] == marked[1]
    assert marked[0][0] == ""
    assert "model.layers.1.mlp.up_proj" in marked[0]
