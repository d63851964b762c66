"""`engine.replan`: as if a checkpoint were saved and loaded under the new block, bit for bit, in the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.engine import apply_plan
from tests.helpers.live_tensors import Watch
from tests.helpers.models import MIXED, TOKENS, llama, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, SentBytes, Sequence_, assert_same_run, check_sequence, counters_of
from tests.helpers.training import assert_identical, dense_state, gathered, refusal
from tests.helpers.whole_tensors import WHOLE_TENSORS

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


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return WHOLE_TENSORS["Adafactor"](two_groups(dict(model.named_parameters())))


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
    "whole_tensors": Sequence_(
        2,
        [Phase({}, 1), Phase({"holders": 2}), Phase(BACKWARD, 2), Phase(LAYERS, 0)],
        optimizer=adafactor,
    ),
    "learning_rates": Sequence_(
        2,
        [
            Phase({"lr_by_coverage": "sqrt"}, 1),
            Phase({"lr_by_coverage": "linear"} | NEURON, 0),
            Phase({}, 2),
        ],
        "bf16",
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
            Phase({"holders": 2, "seed": 2}),
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
    said: list[str] = []
    with mock.patch.object(apply_plan, "announce", said.append):
        result = engine.replan({})
        assert not said
        engine.replan(NEURON)
        engine.replan({"strategy": "block"})
    assert [engine.plan.hash[:16] in text for text in said] == [False, True] * (rank.rank == 0)
    assert not any("model.layers.0" in text for text in said), "a row for each unit"
    assert result.all_sent_bytes == result.least_bytes == 0
    assert_same_run(engine, other)
    for block in (NEURON, {"coverage": 1.0}, BACKWARD):
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
    """Evaluation, state dicts, copies and hooks know the new plan, however parts come."""
    run, plain = SEQUENCES["modes"], llama(num_layers=2)
    seen: list[int] = []
    for evaluation in ("stream", "prefetch", "resident"):
        engine = run.engine(Phase({"evaluation": evaluation}), 1)
        plain = run.model().eval()
        engine.module.register_forward_hook(lambda *_: seen.append(1))
        engine.module.get_parameter("model.norm.weight").register_hook(lambda gradient: seen.append(2))
        run.train(engine, 1)
        with torch.no_grad():
            engine.eval()
            engine(TOKENS)
        engine.train()
        backward, forward = BACKWARD | {"evaluation": "auto"}, {"regime": "forward", "evaluation": evaluation}
        for block in (NEURON, backward, {"strategy": "block"}, forward):
            engine.replan(block)
            plain.load_state_dict(dense_state(engine))
            seen.clear()
            with torch.no_grad():
                engine.eval()
                found = engine(TOKENS).logits
                torch.testing.assert_close(found, plain(TOKENS).logits, rtol=1e-5, atol=1e-5)
            engine.train()
            run.train(engine, 1)
            assert seen == [1, 1, 2]
    with engine.dense():
        copied = deepcopy(engine.module)
    assert_identical(dense_state(engine), copied.state_dict())
    assert "_sdp" not in " ".join(name for module in copied.modules() for name in vars(module))


class Peak(SentBytes):
    """Of all live tensors, as often as something travels."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.num_bytes = 0

    def metered(self, work: Any, num_bytes: int) -> Any:
        self.num_bytes = max(self.num_bytes, self._watch.num_bytes())
        return super().metered(work, num_bytes)


def memory(rank: Rank) -> None:
    """At most the state before, the state after and two buckets; what is gone is freed."""
    bucket = 2048
    zero = {"stage": 1, "reduce_bucket_size": bucket}
    run = Sequence_(2, [], "bf16", config={"zero_optimization": zero})
    with Watch() as watch:
        engine = run.engine(Phase(NEURON), 1)
        run.train(engine, 2)
        before = first = watch.num_bytes()
        for block in ({"holders": 2}, {"strategy": "block", "holders": 1}, BACKWARD | NEURON, {"regime": "forward"}):
            engine.dp_group.meter = peak = Peak(watch)
            engine.replan(block)
            engine.dp_group.meter = None
            after = watch.num_bytes()
            assert peak.num_bytes <= before + after + 2 * 4 * bucket, (peak.num_bytes, before, after)
            assert peak.num_bytes or block == {"regime": "forward"}, "nothing moved"
            before = after
        assert watch.settled_bytes(first) <= first, "something of another plan is still there"


def one_rank_s_names(rank: Rank) -> None:
    """Ranks that ask for different plans are told so, and go on."""
    run = SEQUENCES["modes"]
    engine, other = (run.engine(Phase({}), 1) for _ in range(2))
    refusal(ValueError, lambda: engine.replan({"seed": rank.rank}), "seed is 0 on rank 0 and 1 on rank 1")
    refusal(ValueError, lambda: engine.replan({}, stage=rank.rank), "zero_optimization.stage is")
    assert run.train(engine, 1) == run.train(other, 1)
    assert_same_run(engine, other)
    assert len(set(gathered(engine.replan({"holders": 2}).least_bytes))) == 1


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for name, run in SEQUENCES.items():
        if run.size == size:
            yield name, partial(check_sequence, run)
    if size == 2:
        yield "there_and_back", there_and_back
        yield "coverage_is_by_flops", coverage_is_by_flops
        yield "before_the_first_step", before_the_first_step
        yield "the_dense_model_at_once", the_dense_model_at_once
        yield "memory", memory
        yield "one_rank_s_names", one_rank_s_names


@pytest.mark.checks(
    (2, 3, 4),
    _cases,
    slow=[
        "2-the_dense*",
        "*bf16*",
        "3-depth*",
        "4-placement",
        "3-fp32*",
        "2-learning*",
        "2-adagrad",
        "2-whole*",
        "2-memory",
        "2-before*",
    ],
)
def test_replan(outcome: str | None) -> None:
    assert outcome is None, outcome
