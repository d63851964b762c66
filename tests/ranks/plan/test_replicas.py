"""Fewer subnetworks than ranks: replicas train what the reference says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.models import llama, loss_of, without_block
from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal, sgd, train

SIZE = 4


def settings_of(stage: int = 1, **block: Any) -> dict[str, Any]:
    return sgd(stage=stage, **({"subnetworks": 2} | block))


def one_subnetwork_is_data_parallelism(rank: Rank) -> None:
    """k = 1: the losses and weights of plain DeepSpeed, to the rounding of sums in another order."""
    settings = settings_of(subnetworks=1)
    plain = without_block(settings)
    engines = [engine_of(settings), engine_of(plain | {"zero_allow_untested_optimizer": True})]
    losses = [train(engine, num_steps=3) for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, expected = (dense_state(engine) for engine in engines)
    start = llama().state_dict()
    for name, value in expected.items():
        moved = (value - start[name]).norm()
        assert (ours[name] - value).norm() <= 1e-5 * moved + 3 * 2**-24 * value.norm(), name


def replicas_are_neighbors(rank: Rank) -> None:
    """Launchers number ranks node by node, so a subnetwork's replicas are on one node where they fit."""
    assert engine_of(settings_of()).plan.subnetwork_of_rank == (0, 0, 1, 1)


def plans_that_differ(rank: Rank) -> None:
    """One rank reads another file under the same name of a setting."""
    plan, path = engine_of(sgd(holders=1, subnetworks=2)).plan, rank.folder / f"plan_{rank.rank}.json"
    holders = tuple((1 - one,) for (one,) in plan.holders) if rank.rank == 3 else plan.holders
    replace(plan, holders=holders).save(path)
    refusal(RuntimeError, lambda: engine_of(sgd(assignment=str(path))), "rank 3 computed a different plan from rank 0")


def plan_given_back(rank: Rank) -> None:
    """The file's ranks are those of another run."""
    engine = engine_of(sgd(holders=1, subnetworks=2))
    path = str(rank.folder / "plan.json")
    if rank.rank == 0:
        replace(engine.plan, subnetwork_of_rank=(0, 1)).save(path)
    gathered(None)
    again = engine_of(settings_of(subnetworks="auto", assignment=path))
    assert (again.plan.hash, again.plan.subnetwork_of_rank) == (engine.plan.hash, (0, 0, 1, 1))


def dense_model(rank: Rank) -> None:
    """Evaluated and saved whole, and without Transformers' knowing of us."""
    from transformers import AutoModelForCausalLM

    engine = engine_of(settings_of(strategy="neuron"))
    train(engine, num_steps=2)
    state = dense_state(engine)
    engine.save_pretrained(rank.folder / "hf")
    saved = AutoModelForCausalLM.from_pretrained(rank.folder / "hf")
    assert_identical(saved.state_dict(), state)
    batch = torch.arange(8)[None]
    with torch.no_grad():
        engine.eval()
        for _ in range(2):
            torch.testing.assert_close(loss_of(engine, batch), loss_of(saved, batch), rtol=1e-6, atol=0)
    engine.train()
    train(engine, num_steps=1)


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    case = Case(SIZE, 1, "backward", "neuron", replicas=SIZE)  # one subnetwork; several are in the oracle's sample
    yield str(case), CaseCheck(case)
    for check in (
        one_subnetwork_is_data_parallelism,
        replicas_are_neighbors,
        plans_that_differ,
        plan_given_back,
        dense_model,
    ):
        yield check.__name__, check


@pytest.mark.slow  # an axis of the oracle
@pytest.mark.checks(SIZE, _checks)
def test_replicas(outcome: str | None) -> None:
    assert outcome is None, outcome
