"""A `forward` that was bound to a module runs its copies only if it keeps nothing of the module."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaMLP

from sdp_deepspeed.masking.mixins import unmixed
from sdp_deepspeed.masking.own_forward import runs_by_another_forward
from tests.helpers.descriptions import check
from tests.helpers.masked_modules import build, masked, plan_of, tokens


def closure(module: Any) -> Callable[..., Any]:
    """The usual way to wrap a forward."""
    old = module.forward
    return lambda self, *args, **options: old(*args, **options)


def wrapped_twice(module: Any) -> Callable[..., Any]:
    """What it closes over are functions and a table, of which one has the old forward."""
    inner = {"old": partial(closure(module), module)}
    return lambda self, *args, **options: inner["old"](*args, **options)


def default(module: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, old: Any = module.forward, **options: Any) -> Any:
        return old(*args, **options)

    return forward


def of_another_module(module: Any) -> Callable[..., Any]:
    """Beside its own weights it uses one of the module's without its `self`."""
    weight = next(module.parameters())
    return lambda self, x: linear(x, weight)


def global_name(module: Any) -> Callable[..., Any]:
    """As in a script, where all names are global."""
    names: dict[str, Any] = {"old": module.forward}
    exec("def forward(self, *args, **options):\n    return old(*args, **options)", names)
    return names["forward"]


def of_its_class(module: Any) -> Callable[..., Any]:
    """Its class will be one that has this function."""
    return lambda self, *args, **options: type(self).forward(self, *args, **options)


def above_its_class(module: Any) -> Callable[..., Any]:
    """The same in a function that another one calls."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return super(self.__class__, self).forward(*args, **options)

    return lambda self, *args, **options: forward(self, *args, **options)


UNSAFE = [closure, wrapped_twice, default, of_another_module, global_name, of_its_class, above_its_class]


def bound(module: nn.Module, make: Callable[[Any], Callable[..., Any]]) -> None:
    module.forward = MethodType(make(module), module)


@pytest.mark.parametrize("make", UNSAFE)
def test_what_keeps_the_module_is_another_forward(make: Callable[[Any], Callable[..., Any]]) -> None:
    module = nn.Linear(2, 2)
    assert not runs_by_another_forward(module)
    bound(module, make)
    assert runs_by_another_forward(module)


def test_what_keeps_nothing_of_the_module_is_not() -> None:
    """Constants, other functions, modules without weights, the forward of a class that it names, and itself."""
    constants, act, module = {"x": torch.ones(2)}, nn.SiLU(), nn.Linear(2, 2)

    def forward(self: Any, x: torch.Tensor, scale: float = 2.0) -> Any:
        assert x.device.type == "cpu"
        return act(nn.Linear.forward(self, x + constants["x"])) * scale if scale else forward(self, x)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    assert not runs_by_another_forward(module)


@pytest.mark.parametrize("body", ["mlp", "self_attn"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [closure, of_its_class])
def test_it_is_refused_where_the_module_would_run_twice(
    make: Callable[[Any], Callable[..., Any]], device: str, body: str
) -> None:
    """Without a trial, and where a model without storage could not be tried out."""
    model: Any = build("llama").to(device)
    bound(getattr(model.model.layers[0], body), make)
    (note,) = check(model, "neuron")
    assert f"a copy of 'model.layers.0.{body}' would run the forward of the original" in note
    with pytest.raises(ValueError, match=rf"'model\.layers\.0\.{body}' has a forward method of its own.*`self` only"):
        masked(model, plan_of(model, "backward"), 0)


@pytest.mark.parametrize("body", ["mlp", "self_attn"])
def test_an_old_forward_that_a_module_keeps_is_each_half_s_own(body: str) -> None:
    model: Any = build("llama")
    expected = model(tokens()).logits
    module = getattr(model.model.layers[0], body)
    module._old_forward = module.forward
    bound(module, lambda module: lambda self, *args, **options: self._old_forward(*args, **options))
    half, _ = masked(model, plan_of(model, "backward"), 0)
    torch.testing.assert_close(half(tokens()).logits, expected)


class Kept:
    """What a closure captures, which a weak reference can watch."""


def of_a_masked_model() -> list[ref[Any]]:
    """What its bound forward captures, and the class that the forward became one of."""
    model: Any = build("llama")
    body, captured = model.model.layers[0].mlp, Kept()

    def forward(self: Any, x: torch.Tensor) -> Any:
        assert isinstance(captured, Kept)
        return LlamaMLP.forward(self, x)

    body.forward = MethodType(forward, body)
    module, _ = masked(model, plan_of(model, "backward"), 0)
    module(tokens())
    kind = unmixed(type(module.model.layers[0].mlp))
    assert kind.forward is forward
    return [ref(captured), ref(kind)]


def test_what_a_forward_captures_goes_with_the_model() -> None:
    left = of_a_masked_model()
    for _ in range(3):  # a class with a mixin goes first, then the one that it was mixed into, then what that had
        gc.collect()
    assert [each() for each in left] == [None, None]
