"""`engine.replan`: as if a checkpoint were saved and loaded under the new block, bit for bit, in the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import unit_costs
from tests.helpers.models import MIXED, TOKENS, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run, check_sequence, counters_of
from tests.helpers.training import dense_state, refusal

Check = Callable[[Rank], None]
NEURON, BACKWARD, LAYERS = {"strategy": "neuron"}, {"regime": "backward"}, {"granularity": "layer"}
DEPTH: dict[str, Any] = {"coverage": [{"units": r"layers\.0\.", "coverage": 1.0}, {"coverage": 0.3333}]}


class Branch(nn.Module):
    """`x + body(norm(x))` whose norm has statistics of the batches that its rank has seen, and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.body.register_buffer("table", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


def statistics() -> nn.Module:
    architectures.register(Branch, architectures.Branch("mlp", norm="norm", body="body"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), Branch(), Branch(), Branch(), nn.Linear(6, 2))
    model[4].bias.requires_grad_(False)
    return model


def statistics_loss(engine: Any, generator: torch.Generator) -> torch.Tensor:
    loss: torch.Tensor = engine(torch.randn(5, 6, generator=generator)).square().mean()
    return loss


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(two_groups(dict(model.named_parameters())), lr=0.01, initial_accumulator_value=0.1)


SEQUENCES = {
    "modes": Sequence_(
        2, [Phase({}, 1), Phase(NEURON), Phase(BACKWARD | NEURON), Phase(BACKWARD), Phase({"holders": 2}), Phase({})]
    ),
    "modes_back_bf16_zero2": Sequence_(
        2,
        [Phase({"holders": 2}, 2), Phase(BACKWARD | NEURON), Phase(LAYERS), Phase(NEURON), Phase({"holders": 2})],
        "bf16",
    ),
    "stages_fp32": Sequence_(2, [Phase(NEURON, 0), Phase({}, 1), Phase(BACKWARD, 0), Phase(NEURON, 2), Phase({}, 0)]),
    "stages_bf16": Sequence_(2, [Phase({}, 2), Phase(NEURON, 0), Phase(BACKWARD | NEURON, 1), Phase({}, 0)], "bf16"),
    "statistics": Sequence_(
        2,
        [Phase({}, 1), Phase({"seed": 3}), Phase(BACKWARD), Phase({"holders": 2}), Phase({})],
        model=statistics,
        loss=statistics_loss,
    ),
    "adagrad": Sequence_(2, [Phase({}, 1), Phase(NEURON), Phase({"holders": 2})], optimizer=adagrad),
    "depth_of_three": Sequence_(
        3, [Phase({"coverage": 0.3333}, 1), Phase(DEPTH), Phase(DEPTH | BACKWARD, 2), Phase({"coverage": 1.0})]
    ),
    "fp32_sums_of_three": Sequence_(
        3, [Phase({"holders": 2} | NEURON, 1), Phase({"strategy": MIXED}), Phase(DEPTH, 2)], "bf16+fp32"
    ),
    "replicas_and_draws": Sequence_(
        4,
        [
            Phase({"subnetworks": 2}, 1),
            Phase({"holders": 2, "seed": 1}),
            Phase({"subnetworks": 2} | NEURON),
            Phase({"holders": 2, "neuron_groups": 8} | NEURON | BACKWARD, 0),
        ],
    ),
}


def there_and_back(rank: Rank) -> None:
    """Another plan and the first one again, and the same block once more: nothing has changed."""
    run = SEQUENCES["modes"]
    engine, other = (run.engine(Phase({}), 1) for _ in range(2))
    for each in (engine, other):
        run.train(each, 2)
    for block in ({}, NEURON, {"coverage": 1.0}, BACKWARD):
        engine.replan(block)
    engine.replan({"holders": 1, "strategy": "block", "regime": "forward"})
    assert_same_run(engine, other)
    assert engine.block == other.block
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)
    assert counters_of(engine) == counters_of(other)


def coverage_is_by_flops(rank: Rank) -> None:
    """Of the plan that is there."""
    run = SEQUENCES["modes"]
    engine = run.engine(Phase({}), 1)
    assert engine.coverage == 0.5
    engine.replan({"coverage": [{"units": "mlp", "coverage": 1.0}, {"coverage": 0.5}]})
    units = engine.plan.units
    flops = {unit.name: c.flops for unit, c in zip(units, unit_costs(run.model(), units), strict=True)}
    mlps = sum(count for name, count in flops.items() if "mlp" in name)
    assert engine.coverage == pytest.approx(0.5 + 0.5 * mlps / sum(flops.values()))
    assert engine.coverage != engine.plan.coverage == 0.75


def before_the_first_step(rank: Rank) -> None:
    """There are no moments yet."""
    run = SEQUENCES["modes"]
    engine, other = run.engine(Phase({}), 1), run.engine(Phase(NEURON), 1)
    engine.replan(NEURON)
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)


def the_dense_model_at_once(rank: Rank) -> None:
    """Evaluation and hooks know the new plan; a loss of before does not disturb."""
    run, seen = SEQUENCES["modes"], list[int]()
    engine, plain = run.engine(Phase({}), 1), run.model().eval()
    engine.module.register_forward_hook(lambda *_: seen.append(1))
    engine.module.get_parameter("model.norm.weight").register_hook(lambda gradient: seen.append(2))
    for block in (NEURON, BACKWARD, {"strategy": "block"}, {"regime": "forward"}):
        last = engine(input_ids=TOKENS, labels=TOKENS).loss  # as a user's loop keeps it
        engine.backward(last)
        engine.step()
        engine.replan(block)
        plain.load_state_dict(dense_state(engine))
        seen.clear()
        with torch.no_grad():
            engine.eval()
            torch.testing.assert_close(engine(TOKENS).logits, plain(TOKENS).logits, rtol=1e-5, atol=1e-5)
        engine.train()
        run.train(engine, 1)
        assert seen == [1, 1, 2]
        del last


def ranks_that_differ(rank: Rank) -> None:
    """Ranks that ask for different plans are told so, and go on."""
    run = SEQUENCES["modes"]
    engine, other = (run.engine(Phase({}), 1) for _ in range(2))
    refusal((ValueError, RuntimeError), lambda: engine.replan({"seed": rank.rank}), "rank 1")
    refusal((ValueError, RuntimeError), lambda: engine.replan({}, stage=rank.rank), "rank 1")
    assert run.train(engine, 1) == run.train(other, 1)
    assert_same_run(engine, other)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for name, run in SEQUENCES.items():
        if run.size == size:
            yield name, partial(check_sequence, run)
    if size == 2:
        yield "there_and_back", there_and_back
        yield "coverage_is_by_flops", coverage_is_by_flops
        yield "before_the_first_step", before_the_first_step
        yield "the_dense_model_at_once", the_dense_model_at_once
        yield "ranks_that_differ", ranks_that_differ


@pytest.mark.checks(
    (2, 3, 4),
    _cases,
    slow=[
        "2-the_dense*",
        "*bf16*",
        "3-depth*",
        "3-fp32*",
        "2-adagrad",
        "2-before*",
    ],
)
def test_replan(outcome: str | None) -> None:
    assert outcome is None, outcome
