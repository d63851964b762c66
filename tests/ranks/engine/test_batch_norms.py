"""Running statistics of batch norms: means over the ranks that run a norm, at evaluation, in dense(), when saved; and
those of the dense model, estimated anew, beside one process that has all ranks' batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import sdp_deepspeed
from sdp_deepspeed.config import MODES
from tests.helpers.batch_norms import Net, batches, means, settings, statistics_of, train
from tests.helpers.models import batches as tokens_of
from tests.helpers.models import inputs_of, llama
from tests.helpers.more_models import SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal
from tests.helpers.training import train as train_on_tokens

SIZE, NUM = 3, 3
pytestmark = pytest.mark.world(SIZE)
ROUNDING = 2.0**-23  # fp64 sums in another order, rounded to fp32


def assert_means(found: dict[str, torch.Tensor], before: list[dict[str, torch.Tensor]]) -> None:
    """What a rank has is the mean over those that had it before, and the same bits on all that have it."""
    expected = means(before)
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=ROUNDING, atol=0)
    by_rank = gathered(found)
    for name in expected:
        values = [of_rank[name] for of_rank in by_rank if name in of_rank]
        assert all(torch.equal(value, values[0]) for value in values), name


@pytest.mark.parametrize(("regime", "momentum"), [("forward", 0.1), ("forward", None), ("backward", 0.1)])
def test_in_an_evaluation_between_steps(rank: Rank, regime: str, momentum: float | None) -> None:
    """Also where micro-steps have come since the last step: the dense model is one, and training goes on with it. In
    the backward regime all ranks run all norms."""
    engine = engine_of(settings(holders=2, accumulation=2, regime=regime), Net(momentum=momentum))
    train(engine, rank.rank, num_steps=3)
    before = gathered(statistics_of(engine.module))
    shared = [statistics["norm.running_mean"] for statistics in before]
    assert not torch.equal(shared[0], shared[1]), "each rank has batches of its own"
    images = batches(7, 1)[0][0]
    engine.eval()
    with torch.no_grad():
        found = [engine(images) for _ in range(2)]
    dense = Net(momentum=momentum).eval()
    dense.load_state_dict(dense_state(engine))
    with torch.no_grad():
        assert all(torch.equal(logits, dense(images)) for logits in found)
    assert_identical(*itertools.islice(gathered(dense.state_dict()), 2))
    engine.train()
    assert_means(statistics_of(engine.module), before)
    train(engine, rank.rank, num_steps=1)


def test_in_checkpoints(rank: Rank) -> None:
    """Of what all ranks share there is one value, in the middle of a step too, which other layouts resume."""
    engine = engine_of(settings(holders=2, accumulation=2), Net())
    train(engine, rank.rank, num_steps=3)
    before = gathered(statistics_of(engine.module))
    engine.save_checkpoint(rank.folder)
    assert_means(statistics_of(engine.module), before)
    expected = means(gathered(statistics_of(engine.module)))
    for block in ({"holders": 2, "regime": "backward"}, {"holders": 1}):
        other = engine_of(settings(**block), Net())
        other.load_checkpoint(rank.folder)
        found = {name: value for name, value in dense_state(other).items() if name in expected}
        assert_identical(found, expected)


# ---- estimated anew -------------------------------------------------------------------------------------------------

similar = partial(
    torch.testing.assert_close, rtol=1e-5, atol=1e-6
)  # of convolutions over three times the rows: fp32 sums in other orders


def oracle(state: dict[str, torch.Tensor], **net: Any) -> dict[str, torch.Tensor]:
    """Statistics of the dense model with these weights, by PyTorch's own function over the batches of all ranks.
    It counts the batches of all ranks, we those of one."""
    dense = Net(**net)
    dense.load_state_dict(state)
    dense.eval()
    for module in dense.modules():  # as update_bn would, but for dropout
        module.train(isinstance(module, nn.BatchNorm2d))
    with mock.patch.object(Net, "train", lambda self, mode=True: self):
        update_bn([images for rank in range(SIZE) for images, _ in batches(rank, NUM, seed=9)], dense)
    found = statistics_of(dense)
    return {name: torch.tensor(NUM) if name.endswith("tracked") else value for name, value in found.items()}


def compare(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    found = {name: value for name, value in dense_state(engine).items() if name in expected}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        similar(value, expected[name])
    first, *others = gathered(found)
    for other in others:
        assert_identical(first, other)


def test_is_that_of_the_dense_model(rank: Rank) -> None:
    """In both regimes; weights stay, and training goes on."""
    for regime in ("forward", "backward"):
        block = {"holders": 2, "regime": regime, "check_agreement": True}
        engine = engine_of(settings(**block), Net())
        train(engine, rank.rank, num_steps=2)
        state = dense_state(engine)
        own = [images for images, _ in batches(rank.rank, NUM + 2, seed=9)]
        assert sdp_deepspeed.reestimate_batch_norm(engine, iter(own), num_batches=NUM) == 9
        expected = oracle(state)
        compare(engine, expected)
        after = dense_state(engine)
        assert_identical(*({n: v for n, v in each.items() if n not in expected} for each in (state, after)))
        images = batches(7, 1)[0][0]
        dense = Net().eval()
        dense.load_state_dict(after)
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(images), dense(images))
        engine.train()
        train(engine, rank.rank, num_steps=1)


def test_wherever_the_dense_model_is(rank: Rank) -> None:
    """Outside of it and inside, in training and in evaluation mode, of tensors, tuples, lists and dicts of arguments:
    the same bits."""
    engine = engine_of(settings(holders=2), Net())
    train(engine, rank.rank, num_steps=2)
    state = dense_state(engine)
    kinds = (lambda x, y: x, lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"images": x, "classes": y})
    found = []
    for kind, (context, mode) in zip(kinds, itertools.product((nullcontext, engine.dense), (True, False)), strict=True):
        own = [kind(*batch) for batch in batches(rank.rank, NUM, seed=9)]
        entered: AbstractContextManager[None] = context()
        engine.train(mode)
        with entered:
            engine.module.norm.running_mean.fill_(1e3)
            engine.reestimate_batch_norm(own, num_batches=NUM)
        assert engine.module.training == mode
        found.append(statistics_of(engine.module))
        assert_identical(found[-1], found[0])
    compare(engine, oracle(state))


@pytest.mark.slow
def test_of_resnets(rank: Rank) -> None:
    """In all modes: vectors that are cut are written to each piece's holders, in halves too."""
    for regime, strategy in MODES:
        block = {"holders": 2, "regime": regime, "strategy": strategy, "neuron_groups": 3}
        if strategy == "block":
            del block["neuron_groups"]
        engine = engine_of(settings(**block, check_agreement=True), SPECIMENS["resnet"].build())
        train_on_tokens(engine, num_steps=2)
        state = dense_state(engine)
        tokens = [next(tokens_of(SIZE, NUM, seed=9))[of_rank] for of_rank in range(SIZE)]
        own = [inputs_of(engine, batch) for batch in tokens[rank.rank]]
        num_norms = engine.reestimate_batch_norm(own, num_batches=NUM)
        dense: Any = SPECIMENS["resnet"].build()
        dense.load_state_dict(state)
        norms = [norm for norm in dense.eval().modules() if isinstance(norm, nn.BatchNorm2d)]
        assert num_norms == len(norms)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        with torch.no_grad():
            for batch in itertools.chain.from_iterable(tokens):
                dense(**inputs_of(dense, batch))
        expected = statistics_of(dense)
        compare(engine, {n: torch.tensor(NUM) if n.endswith("tracked") else v for n, v in expected.items()})
        dense.load_state_dict(dense_state(engine))
        engine.eval()
        with torch.no_grad():
            found, logits = (model(**own[0]).logits for model in (engine, dense.eval()))
        assert torch.equal(found, logits)
        engine.train()
        train_on_tokens(engine, num_steps=1)


def settings_of(model: nn.Module) -> dict[str, Any]:
    return {name: (module.training, getattr(module, "momentum", "")) for name, module in model.named_modules()}


def test_leaves_everything_else(rank: Rank) -> None:
    """Modes, also of single modules, and random numbers."""
    engine = engine_of(settings(holders=2), Net(momentum=None))
    train(engine, rank.rank, num_steps=1)
    state = dense_state(engine)
    engine.module.layers[1].eval()
    modes = settings_of(engine.module)
    drawn = []
    for runs in (True, False):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if runs:
            engine.reestimate_batch_norm(drawing(rank), num_batches=NUM)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert modes == settings_of(engine.module)
    compare(engine, oracle(state, momentum=None))


def drawing(rank: Rank) -> Iterator[torch.Tensor]:
    for images, _ in batches(rank.rank, NUM, seed=9):
        torch.rand(1), np.random.rand(), random.random()
        yield images


@pytest.mark.slow
def test_mistakes(rank: Rank) -> None:
    """One error on all ranks, and the statistics are those of before."""
    for regime in ("forward", "backward"):
        engine = engine_of(settings(holders=2, regime=regime), Net())
        train(engine, rank.rank, num_steps=1)
        dense_state(engine)  # takes the means over the ranks, which stay
        before = statistics_of(engine.module)
        own = [images for images, _ in batches(rank.rank, NUM - (rank.rank == 1), seed=9)]
        words = ("num_batches: got 3", "found 2", "[on rank 1]")
        call = engine.reestimate_batch_norm
        refusal(ValueError, partial(call, own, num_batches=NUM), *words)
        for number in (0, 1 + (rank.rank == 2)):
            refusal(ValueError, partial(call, own, num_batches=number), "num_batches: got")
        wrong = [own[0], own[1][:, : 3 - (rank.rank == 0)]]
        refusal(RuntimeError, partial(call, wrong, num_batches=2), "[on rank 0]")
        assert_identical(statistics_of(engine.module), before)
        assert engine.module.training
        engine.reestimate_batch_norm(own, num_batches=2)
        train(engine, rank.rank, num_steps=1)


def test_where_there_is_nothing_to_do(rank: Rank) -> None:
    """Asks nobody; other models are refused."""
    engine = engine_of(settings(holders=2), llama())
    with mock.patch("sdp_deepspeed.engine.dense_view.DenseView.make_resident", side_effect=AssertionError):
        assert engine.reestimate_batch_norm([], num_batches=1) == 0
    with pytest.raises(ValueError, match=r"got Net, expected the engine .*fully_shard"):
        sdp_deepspeed.reestimate_batch_norm(Net(), [], num_batches=1)
