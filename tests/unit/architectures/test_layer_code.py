"""A layer that runs other code than its description was written for is refused, with the line that describes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, registry
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.models import llama

OWN_LINE = r"register\(PostNorm, \*architectures\.branches_of\(LlamaDecoderLayer\)\)"


def post_norm(self: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    x = self.input_layernorm(x + self.self_attn(x, **options)[0])
    return self.post_attention_layernorm(x + self.mlp(x))


class PostNorm(LlamaDecoderLayer):
    forward = post_norm


class Mixin:
    forward = post_norm


class ByMixin(Mixin, LlamaDecoderLayer):
    pass


class ByCall(LlamaDecoderLayer):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return post_norm(self, *args, **options)


class ByWrapper(LlamaDecoderLayer):
    """Calls the one of its base, and does more: that it says what it wraps does not help."""

    @functools.wraps(LlamaDecoderLayer.forward)
    def forward(self, *args: Any, **options: Any) -> Any:
        return self.input_layernorm(super().forward(*args, **options))


class OtherModules(LlamaDecoderLayer):
    """The same forward around other modules."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mlp = nn.Linear(16, 16)

    def extra_repr(self) -> str:
        return "other"


class Stepwise(nn.Module):
    """Its forward runs another method, which a subclass may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


class Subtracting(Stepwise):
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.body(self.norm(x))


@pytest.fixture(autouse=True)
def descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))


def with_layers(layer_class: type) -> nn.Module:
    model: Any = llama(1)
    model.model.layers[0] = layer_class(model.config, 0)
    return model


@pytest.mark.parametrize("layer_class", [PostNorm, ByMixin, ByCall, ByWrapper])
def test_a_subclass_that_computes_otherwise_is_refused_until_it_is_described(layer_class: type) -> None:
    line = OWN_LINE.replace("PostNorm", layer_class.__name__)
    with pytest.raises(ValueError, match=rf"'model\.layers\.0': {layer_class.__name__} has its own.*{line}"):
        proven_branches(with_layers(layer_class), "neuron")
    architectures.register(layer_class, *architectures.branches_of(LlamaDecoderLayer) or ())
    assert len(proven_branches(with_layers(layer_class), "neuron")) == 2


def test_a_subclass_with_other_modules_takes_the_description() -> None:
    assert len(proven_branches(with_layers(OtherModules), "neuron")) == 2


def test_a_method_that_forward_runs_counts_too() -> None:
    architectures.register(Stepwise, Branch("mlp", norm="norm", body="body"))
    assert proven_branches(nn.Sequential(Stepwise()), "neuron")
    with pytest.raises(ValueError, match=r"'0': Subtracting has its own 'add'.*register\(Subtracting, "):
        proven_branches(nn.Sequential(Subtracting()), "neuron")


def test_a_method_that_one_layer_has_of_its_own_is_refused() -> None:
    architectures.register(Stepwise, Branch("mlp", norm="norm", body="body"))
    layer: Any = Stepwise()
    layer.add = lambda x: 2 * x
    with pytest.raises(ValueError, match=r"'0': this Stepwise has its own method 'add'"):
        proven_branches(nn.Sequential(layer), "neuron")


@pytest.mark.parametrize("by_name", [False, True])
def test_a_class_whose_forward_was_replaced_must_be_described_again(
    monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    if not by_name:
        architectures.register(LlamaDecoderLayer, *architectures.branches_of(LlamaDecoderLayer) or ())
    monkeypatch.setattr(LlamaDecoderLayer, "forward", post_norm)
    again = r"register\(LlamaDecoderLayer, \*architectures\.branches_of\(LlamaDecoderLayer\)"
    with pytest.raises(ValueError, match=rf"methods of LlamaDecoderLayer were replaced.*{again}"):
        proven_branches(llama(1), "neuron")
    architectures.register(LlamaDecoderLayer, *architectures.branches_of(LlamaDecoderLayer) or ())
    assert proven_branches(llama(1), "neuron")


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **options: Any) -> Any:
        return forward(*args, **options)

    return wrapper


def as_accelerate_hooks(forward: Callable[..., Any]) -> Any:
    return functools.update_wrapper(functools.partial(lambda module, *args: forward(*args), None), forward)


@pytest.mark.parametrize("wrap", [wrapped, as_accelerate_hooks])
@pytest.mark.parametrize("of_class", [False, True])
def test_wrappers_that_say_what_they_wrap_are_seen_through(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[..., Any], of_class: bool
) -> None:
    model: Any = llama(1)
    owner = LlamaDecoderLayer if of_class else model.model.layers[0]
    monkeypatch.setattr(owner, "forward", wrap(owner.forward))
    assert proven_branches(model, "neuron")


def test_a_layer_with_another_forward_of_its_own_is_refused() -> None:
    model: Any = llama(1)
    model.model.layers[0].forward = functools.partial(post_norm, model.model.layers[0])
    with pytest.raises(ValueError, match=r"'model\.layers\.0': this LlamaDecoderLayer has its own method 'forward'"):
        proven_branches(model, "neuron")
