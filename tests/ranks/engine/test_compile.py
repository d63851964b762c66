"""`torch.compile`: one graph in training, without breaks; the same results, of the dense model in evaluation too.

Backends that are quick on a CPU: "eager" runs what was traced as it is, "aot_eager" traces backward too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from sdp_deepspeed.config import MODES, Mode
from tests.helpers.models import SPECIMENS, batches, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, engine_of, sgd, train

pytestmark = pytest.mark.world(2)


def start(model: nn.Module, stage: int, mode: Mode, **block: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    block |= {"regime": mode.regime, "strategy": mode.strategy, "check_agreement": True}
    return engine_of(sgd(stage=stage, clip=0.5, **block), model)


def num_graphs() -> tuple[int, int]:
    """What was compiled so far: graphs, and breaks between them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = loss_of(engine, next(batches(1, 1))[0][0]).item()
    engine.train()
    return loss


def followed(engine: Any) -> list[float]:
    """Losses in training, in evaluation and in training again, and the norm."""
    losses = [*train(engine, num_steps=2), evaluated(engine), *train(engine, num_steps=1, first=2), evaluated(engine)]
    return [*losses, engine.get_global_grad_norm()]


def compare(compiled: Any, expected: Any) -> None:
    """The same operations, traced: only sums of gradients may have another order."""
    assert followed(compiled) == pytest.approx(followed(expected), rel=1e-5)
    own, other = dense_state(compiled), dense_state(expected)
    assert own.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_engine_compile(rank: Rank) -> None:
    """`engine.compile()` in all modes and at all stages."""
    for number, mode in enumerate(MODES):
        engines = [start(SPECIMENS["llama"].build(), (2, 1, 0, 2)[number], mode) for _ in range(2)]
        engines[0].compile(backend=("aot_eager", "eager", "eager", "aot_eager")[number])
        losses = train(engines[0], num_steps=2)
        graphs, breaks = num_graphs()
        assert breaks == 0, (mode, dict(counters["graph_break"]))
        # In the backward regime a block's weights are frozen; that the first layer's input needs a gradient is news.
        assert 1 <= graphs <= 2, (mode, graphs)
        assert losses == pytest.approx(train(engines[1], num_steps=2), rel=1e-5)
        compare(*engines)


@pytest.mark.slow
def test_wrapped_before(rank: Rank) -> None:
    """`torch.compile(model)` given to `deepspeed.initialize`: names stay those of the model."""
    model = SPECIMENS["llama"].build()
    names = list(model.state_dict())
    compiled: Any = torch.compile(model, backend="eager")
    engine = start(compiled, 2, MODES[3])
    assert engine.module is model
    expected = engine_of(sgd(stage=2, clip=0.5, regime="backward", strategy="neuron"), SPECIMENS["llama"].build())
    train(engine, num_steps=1)
    assert num_graphs() == (1, 0)
    train(expected, num_steps=1)
    compare(engine, expected)
    assert list(dense_state(engine)) == names


def test_compiled_parts(rank: Rank) -> None:
    """A compiled MLP, a compiled linear layer in it, and forwards compiled as methods, both where they are replaced and
    where they run on what this rank has; a body in two parts does not run the held part twice."""
    parts: list[tuple[Callable[[Any], nn.Module], Mode, bool]] = [
        (lambda layer: layer.mlp, MODES[0], True),
        (lambda layer: layer.mlp, MODES[1], False),
        (lambda layer: layer.mlp.down_proj, MODES[3], True),
        (lambda layer: layer.mlp.down_proj, MODES[3], False),
    ]
    for part, mode, is_method in parts:
        model: Any = SPECIMENS["llama"].build()
        for layer in model.model.layers:
            if is_method:
                part(layer).forward = torch.compile(part(layer).forward, backend="eager")
            else:
                part(layer).compile(backend="eager")
        engine = start(model, 1, mode)
        expected = engine_of(sgd(clip=0.5, regime=mode.regime, strategy=mode.strategy), SPECIMENS["llama"].build())
        compare(engine, expected)
