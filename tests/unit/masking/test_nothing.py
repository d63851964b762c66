"""A lacking branch adds nothing; whatever else is done with its output names the branch and says what to write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, locate_branches, registry, units_of_branches
from sdp_deepspeed.masking.nothing import Nothing
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.masked_modules import infos
from tests.helpers.rank_models import mask_of

NOTHING: Any = Nothing("layers.0.mlp")
ADVICE = r"layers\.0\.mlp: this rank lacks the branch.*must be a submodule.*`after`"


def test_nothing_is_neutral() -> None:
    tensor = torch.randn(3, requires_grad=True)
    assert tensor + NOTHING is tensor
    assert NOTHING + tensor is tensor
    assert NOTHING + NOTHING is NOTHING
    assert torch.add(tensor, NOTHING) is tensor
    assert tensor.add(NOTHING) is tensor
    total = tensor.detach()
    total += NOTHING
    assert torch.equal(total, tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 0.5 * NOTHING,
        lambda x: x + NOTHING * torch.tensor(0.5),
        lambda x: x + NOTHING * x,  # the weights of a layer scale
        lambda x: x + x * NOTHING,
        lambda x: x + torch.mul(NOTHING, x),
        lambda x: x + NOTHING / 2,
        lambda x: x + torch.div(NOTHING, 2),
        lambda x: x - NOTHING,
        lambda x: torch.sub(x, NOTHING),
        lambda x: -NOTHING + x,
        lambda x: x + torch.neg(NOTHING),
        lambda x: x + F.dropout(NOTHING, p=0.5, training=True),
        lambda x: x + nn.Dropout(0.5)(NOTHING),
        lambda x: F.dropout(NOTHING, 0.5, training=True, inplace=True) + x,
        lambda x: x + F.relu(NOTHING),
        lambda x: x + nn.ReLU(inplace=True)(NOTHING),
        lambda x: torch.relu(NOTHING) + x,
        lambda x: x + NOTHING.relu(),
        lambda x: x + NOTHING.div(0.5) * x,
        lambda x: x + NOTHING.mul(x).neg(),
        lambda x: x + NOTHING.to(torch.bfloat16),
        lambda x: x + NOTHING.half().type(torch.float32),
        lambda x: x + NOTHING.to(x.dtype, non_blocking=True).float().contiguous(),
    ],
)
def test_what_leaves_a_zero_a_zero_is_harmless(use: Callable[[torch.Tensor], Any]) -> None:
    """Of a tensor of zeros the same makes zeros, which is why it may be left out."""
    x = torch.randn(2)
    assert use(x) is x


def test_copies_of_what_is_written_to() -> None:
    """But not of what the addition itself writes to."""
    nothing: Any = Nothing("layers.0.mlp", copies=True)
    tensor = torch.randn(3)
    for total in (tensor + nothing, nothing + tensor, torch.add(tensor, nothing), torch.add(nothing, other=tensor)):
        assert total is not tensor
        assert torch.equal(total, tensor)
    total = nothing
    total += tensor
    assert total is not tensor
    total = tensor
    total += nothing
    assert total is tensor
    assert tensor.add_(nothing) is tensor
    assert nothing + nothing is nothing
    assert torch.add(nothing, nothing) is nothing


@pytest.mark.parametrize(
    "use",
    [
        lambda x: NOTHING - x,
        lambda x: 1 / NOTHING,
        lambda x: x / NOTHING,
        lambda x: x.mul_(NOTHING),
        lambda x: operator.imul(x, NOTHING),
        lambda x: operator.isub(NOTHING, x),
        lambda x: x @ NOTHING,
        lambda x: x + torch.tanh(NOTHING),
        lambda x: x + F.gelu(NOTHING),
        lambda x: x + F.alpha_dropout(NOTHING),
        lambda x: x + nn.LayerNorm(2)(NOTHING),
        lambda x: torch.mul(x, NOTHING, out=torch.empty(2)),
        lambda x: x + NOTHING[0],
        lambda x: x + NOTHING.detach(),
        lambda x: NOTHING.shape,
        lambda x: NOTHING.size(0),
        lambda x: NOTHING.view(2),
        lambda x: torch.roll(NOTHING, 1),
        lambda x: x + NOTHING[:1],
        lambda x: torch.add(NOTHING, x, alpha=0.5),
        lambda x: torch.add(x, NOTHING, alpha=0.5),
        lambda x: torch.add(x, NOTHING, out=torch.empty(2)),
        lambda x: torch.rsub(NOTHING, x),
        lambda x: torch.stack([x, NOTHING]),
        lambda x: torch.cat((NOTHING, x)),
        lambda x: x == NOTHING,
        lambda x: x != NOTHING,
        lambda x: NOTHING > 0,
        lambda x: abs(NOTHING),
        lambda x: x // NOTHING,
    ],
)
def test_what_is_no_addition_names_the_branch(use: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, RuntimeError), match=ADVICE):
        use(torch.ones(2))


def test_what_is_done_to_tuples_names_the_number_of_outputs() -> None:
    for use in (lambda: [*NOTHING], lambda: NOTHING[0], lambda: len(NOTHING)):
        with pytest.raises(TypeError, match=r"this rank lacks the branch.*tuple needs `num_outputs`"):
            use()


def test_whoever_asks_what_it_is_gets_an_answer() -> None:
    assert not hasattr(NOTHING, "requires_grad")
    assert not hasattr(NOTHING, "__array__")
    assert repr(NOTHING) == "<nothing: this rank lacks layers.0.mlp>"


class Layer(nn.Module):
    def __init__(self, between: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), between, nn.Linear(6, 4))
        self.second = nn.Linear(4, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.mlp(self.norm(x)))
        return x + self.dropout(self.second(self.other(x)))


INNER = InnerLayers((Cut("0", 0), Cut("2", 1, is_output=True)))


def described(monkeypatch: pytest.MonkeyPatch, *after: str) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    first = Branch("mlp", norm="norm", body="mlp", after=after, inner=INNER)
    architectures.register(Layer, first, Branch("second", norm="other", body="second", after=after))


def test_a_dropout_that_no_description_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any module may do so that is linear, and nothing else."""
    described(monkeypatch)
    model = nn.Sequential(Layer(nn.ReLU(), nn.Dropout(0.5)), Layer(nn.ReLU(), nn.Tanh()))
    units = units_of_branches(locate_branches(model), granularity="sublayer", shared=())
    plan = Plan("forward", "block", 2, 1, 0, tuple(units), ((0,), (1,), (0,), (1,)), (0, 1))
    mask_of(model, locate_branches(model), infos(model), plan, 1)
    assert model[0](torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(TypeError, match=r"^1\.mlp: this rank lacks the branch.*'tanh'"):
        model(torch.ones(1, 4))


def test_a_module_of_two_branches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    described(monkeypatch, "dropout")
    with pytest.raises(ValueError, match=r"'0\.dropout' is the same Dropout in the branches 0\.mlp and 0\.second"):
        locate_branches(nn.Sequential(Layer(nn.ReLU(), nn.Dropout())))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.LayerNorm(6)])
def test_a_norm_over_the_neurons_is_named_at_start(monkeypatch: pytest.MonkeyPatch, norm: nn.Module) -> None:
    described(monkeypatch)
    branch, _ = locate_branches(nn.Sequential(Layer(norm, nn.Identity())))
    assert branch.uncuttable_reason.startswith(
        f"0.mlp.1 ({type(norm).__name__}) has an element for each of the 6 neurons"
    )
    branch, _ = locate_branches(nn.Sequential(Layer(nn.LayerNorm(6, elementwise_affine=False), nn.Identity())))
    assert not branch.uncuttable_reason
