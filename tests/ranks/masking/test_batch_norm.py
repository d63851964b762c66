"""Running statistics of batch norms: means over the ranks that run a norm, at evaluation, in dense(), when saved."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.batch_norms import Net, batches, means, settings, statistics_of, train
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered

SIZE = 3
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


def in_the_dense_view(rank: Rank) -> None:
    """Norms of held units over their holders, shared ones over all ranks; in the backward regime all run everything."""
    for regime, stage, momentum in (("forward", 1, 0.1), ("forward", 0, None), ("backward", 2, 0.1)):
        config = settings(holders=2, regime=regime, check_agreement=True) | {"zero_optimization": {"stage": stage}}
        engine = engine_of(config, Net(momentum=momentum))
        train(engine, rank.rank, num_steps=2)
        before = gathered(statistics_of(engine.module))
        shared = [found["norm.running_mean"] for found in before]
        assert not torch.equal(shared[0], shared[1]), "each rank has batches of its own"
        for _ in range(2):  # averaging what is equal changes nothing
            with engine.dense():
                pass
            assert_means(statistics_of(engine.module), before)
        has_all = regime == "backward"
        held = [name for name in statistics_of(engine.module) if name.startswith("layers")]
        assert (len(held) == len([n for n, _ in engine.module.named_buffers() if n.startswith("layers")])) == has_all


def mean_of_means(rank: Rank) -> None:
    """Once at the end is the same as after every step: a moving average of the mean of the ranks' batches."""
    engine = engine_of(settings(holders=2), Net())
    mean, inputs = torch.zeros(6), []
    engine.module.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().mean((0, 2, 3))))
    train(engine, rank.rank, num_steps=4)
    for of_step in zip(*gathered(inputs), strict=True):
        mean = 0.9 * mean + 0.1 * torch.stack(of_step).mean(0)
    torch.testing.assert_close(dense_state(engine)["norm.running_mean"], mean, rtol=1e-6, atol=1e-7)


def counts_become_the_largest(rank: Rank) -> None:
    engine = engine_of(settings(holders=2), Net())
    engine.module.norm.num_batches_tracked.fill_(10 * rank.rank)
    train(engine, rank.rank, num_steps=1)
    assert int(dense_state(engine)["norm.num_batches_tracked"]) == 10 * (SIZE - 1) + 1


def in_an_evaluation_between_steps(rank: Rank) -> None:
    """Also where micro-steps have come since the last step: the dense model is one, and training goes on with it."""
    engine = engine_of(settings(holders=2, accumulation=2), Net())
    train(engine, rank.rank, num_steps=3)
    before = gathered(statistics_of(engine.module))
    images = batches(7, 1)[0][0]
    engine.eval()
    with torch.no_grad():
        found = [engine(images) for _ in range(2)]
    dense = Net().eval()
    dense.load_state_dict(dense_state(engine))
    with torch.no_grad():
        assert all(torch.equal(logits, dense(images)) for logits in found)
    assert_identical(*itertools.islice(gathered(dense.state_dict()), 2))
    engine.train()
    assert_means(statistics_of(engine.module), before)
    train(engine, rank.rank, num_steps=1)


def in_checkpoints(rank: Rank) -> None:
    """Of what all ranks share there is one value, in the middle of a step too, which other layouts resume."""
    for regime in ("forward", "backward"):
        engine = engine_of(settings(holders=2, accumulation=2, regime=regime), Net())
        train(engine, rank.rank, num_steps=3)
        before = gathered(statistics_of(engine.module))
        folder = rank.folder / regime
        engine.save_checkpoint(folder)
        assert_means(statistics_of(engine.module), before)
        expected = means(gathered(statistics_of(engine.module)))
        for block in ({"holders": 2, "regime": regime}, {"holders": 1}, {"holders": 3}):
            other = engine_of(settings(**block), Net())
            other.load_checkpoint(folder)
            found = {name: value for name, value in dense_state(other).items() if name in expected}
            assert_identical(found, expected)


def under_another_plan(rank: Rank) -> None:
    engine = engine_of(settings(holders=2), Net())
    train(engine, rank.rank, num_steps=2)
    state = dense_state(engine)
    engine.replan({"holders": 1, "seed": 5})
    assert_identical(dense_state(engine), state)
    train(engine, rank.rank, num_steps=1)
    before = gathered(statistics_of(engine.module))
    dense_state(engine)
    assert_means(statistics_of(engine.module), before)


CHECKS: list[Check] = [
    in_the_dense_view,
    mean_of_means,
    in_an_evaluation_between_steps,
    counts_become_the_largest,
    in_checkpoints,
    under_another_plan,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks)
def test_statistics(outcome: str | None) -> None:
    assert outcome is None, outcome
