"""The weights of a copy in a masked module: there for a while, refused where they do not fit."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.masking.other_weights import OtherWeights
from tests.helpers.masked_modules import infos
from tests.helpers.models import llama, loss_of
from tests.helpers.rank_models import mask_of
from tests.unit.masking.test_mixins import plan_of


def masked(regime: str, strategy: str) -> tuple[nn.Module, OtherWeights]:
    model = llama()
    mask = mask_of(model, locate_branches(model), infos(model), plan_of(model, regime, strategy), 0)
    return model, OtherWeights(model, mask)


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_they_are_there_for_a_while(strategy: str) -> None:
    model, other_weights = masked("forward", strategy)
    batch = torch.zeros(1, 4, dtype=torch.long)
    copied = deepcopy(model)
    for parameter in copied.parameters():
        nn.init.constant_(parameter, 0.1)
    before = {name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    for fails in (False, True):
        with suppress(ZeroDivisionError), other_weights.shown(copied):
            assert other_weights.are_shown
            assert torch.equal(loss_of(model, batch), loss_of(copied, batch))
            _ = 1 / (not fails)
        assert not other_weights.are_shown
        for name, parameter in model.named_parameters():
            identity, address, value = before[name]
            assert (id(parameter), parameter.data_ptr()) == (identity, address)
            assert torch.equal(parameter, value)
    with other_weights.shown(copied.double()):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_what_does_not_fit_is_named() -> None:
    model, other_weights = masked("forward", "block")
    words = r"'model\.layers\.\d\..*here \(0,\)\).*deepcopy outside of engine\.dense"
    with pytest.raises(ValueError, match=words), other_weights.shown(llama()):
        pass
    with pytest.raises(ValueError, match="missing"), other_weights.shown(nn.Linear(2, 2)):
        pass
    model, other_weights = masked("backward", "neuron")
    with pytest.raises(ValueError, match=r"held ones only.*resident=True"), other_weights.shown(deepcopy(model)):
        pass
