"""What a layer that is tried out takes from its model, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import registry
from sdp_deepspeed.masking.trial import forked_random_numbers
from tests.helpers.descriptions import check
from tests.helpers.masked_modules import masked, plan_of, tokens
from tests.helpers.mixtures import mixture
from tests.helpers.own_layers import GPT, Block, attention_of, mlp_of


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(Block, attention_of(), mlp_of())


class NotCopied(nn.Embedding):
    def __deepcopy__(self, memo: Any) -> Any:
        pytest.fail("the whole model is copied")


def test_a_layer_that_leads_back_to_its_model_is_copied_alone() -> None:
    """By a hook, and by an attribute."""
    model: Any = GPT(Block)
    model.embed.__class__ = NotCopied
    calls: list[Any] = []
    model.note = lambda *_: calls.append(1)
    model.h[0].register_forward_hook(GPT.extra_repr.__get__(model))
    model.h[0].register_forward_hook(model.note)
    model.h[0].__dict__["parent"] = model
    for strategy in ("block", "neuron"):
        assert check(model, strategy) == []
    assert not calls


@pytest.mark.parametrize("normed", [spectral_norm, parametrizations.weight_norm])
def test_hooks_that_compute_weights_stay(normed: Any) -> None:
    model: Any = GPT(Block)
    for block in model.h:
        normed(block.mlp.down)
    assert check(model) == []


def test_right_descriptions_pass_where_only_the_other_regime_would_refuse() -> None:
    """A compiled forward is said; noise, the loss of routers and lengths of rows are none of a description's."""
    model: Any = GPT(Block)
    for block in model.h:
        block.mlp.forward = torch.compile(block.mlp.forward, backend="eager")
    for strategy in ("block", "neuron"):
        (note,) = check(model, strategy, regime="forward")
        assert "'h.0' (Block) could not be tried out (a copy of 'h.0.mlp' would run" in note
    masked(model, plan_of(model), 0)[0](tokens())

    noisy = mixture("mixtral", router_jitter_noise=0.1, output_router_logits=True)
    kind = type(noisy.model.layers[0])
    own = type("Own", (kind,), {"forward": lambda self, *args, **options: kind.forward(self, *args, **options)})
    architectures.register(own, *architectures.branches_of(kind) or ())
    for layer in noisy.model.layers:
        layer.__class__ = own
    for strategy in ("block", "neuron"):
        assert check(noisy, strategy, regime="forward", shared=[r"layers\.0\."]) == []


@pytest.mark.parametrize("last", [4, 5])
def test_a_trial_that_does_not_fit_in_memory_is_said(last: int) -> None:
    """Where the layer ends in zeros, and where it lacks the branch."""
    calls: list[int] = []

    class Large(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == last:
                raise torch.OutOfMemoryError("too much")
            return super().forward(x)

    architectures.register(Large, attention_of(), mlp_of())
    (note,) = check(GPT(Large))
    assert "(OutOfMemoryError: too much)" in note


def test_random_numbers_of_the_device_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original = torch.random.fork_rng

    def fork(devices: Any, device_type: str = "cuda") -> Any:
        asked.append((devices, device_type))
        return original([])

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    for name in ("cuda:0", "xpu:0", "cpu"):
        with forked_random_numbers(torch.device(name)):
            pass
    assert asked == [([torch.device("cuda:0")], "cuda"), ([torch.device("xpu:0")], "xpu"), ([], "cpu")]
    state = torch.get_rng_state()
    with forked_random_numbers(torch.device("cpu")):
        torch.randn(3, dtype=torch.float32, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
