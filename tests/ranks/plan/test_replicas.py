"""Fewer subnetworks than ranks: replicas train what the reference says, wherever they are placed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sdp_deepspeed.config import MODES
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.models import config, llama, loss_of, without_block
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal, sgd, train

SIZE = 4


@dataclass(frozen=True)
class Replicated:
    """A case with k below the number of ranks, as a check."""

    case: Case
    num_subnetworks: int
    block: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> None:
        check_case(self.case, rank, subnetworks=self.num_subnetworks, **self.block)


# Every mode, stage, placement, number of subnetworks and of holders; bf16 once, micro-steps on each stage.
PACKED, SPREAD = {"placement": "packed"}, {"placement": "spread"}
CASES = {
    "half-forward-block": Replicated(Case(SIZE, 1), 2, SPREAD),
    "half-forward-neuron": Replicated(Case(SIZE, 1, "forward", "neuron", stage=2, accumulation=3), 2, PACKED),
    "half-forward-mixed": Replicated(
        Case(SIZE, 1, "forward", "mixed", "gpt2", accumulation=3, optimizer="SGD", precision="bf16+fp32"), 2
    ),
    "half-backward-block": Replicated(Case(SIZE, 1, "backward", stage=0, accumulation=3), 2, PACKED),
    "half-backward-neuron": Replicated(Case(SIZE, 1, "backward", "neuron", stage=2), 2, SPREAD),
    "all-forward-neuron": Replicated(Case(SIZE, 2, "forward", "neuron", "llama_tied", stage=0), 2, SPREAD),
    "all-backward-block": Replicated(Case(SIZE, 2, "backward", "block", "gpt_neox_parallel", stage=2), 2),
    "one-forward-block": Replicated(Case(SIZE, 1, stage=2), 1),
    "one-backward-neuron": Replicated(Case(SIZE, 1, "backward", "neuron"), 1),
}


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


def auto_looks_at_the_nodes(rank: Rank) -> None:
    """The launcher's number of a node decides, since all ranks of this test are on one host."""
    by_numbers = {(0, 0, 1, 1): (0, 0, 1, 1), (0, 1, 0, 1): (0, 1, 0, 1)}
    for numbers, subnetworks in by_numbers.items():
        os.environ["GROUP_RANK"] = str(numbers[rank.rank])
        try:
            plan: Plan = engine_of(settings_of()).plan
        finally:
            del os.environ["GROUP_RANK"]
        assert plan.placement is not None
        assert (plan.placement.name, plan.subnetwork_of_rank) == ("packed", subnetworks)
        assert plan.placement.num_nodes == len(set(numbers))
        assert gathered(plan.subnetwork_of_rank) == [subnetworks] * rank.size


def bytes_per_element(rank: Rank) -> None:
    """What is printed knows the dtypes, and that stage 2 sends gradients after each micro-step."""
    os.environ["GROUP_RANK"] = str(rank.rank)
    try:
        sent = []
        for stage, accumulation, more in ((1, 3, {}), (2, 3, {}), (1, 3, {"bf16": {"enabled": True}})):
            settings = settings_of(stage) | {"gradient_accumulation_steps": accumulation} | more
            placement = engine_of(settings).plan.placement
            sent.append(placement.spread_bytes)
    finally:
        del os.environ["GROUP_RANK"]
    assert sent == [sent[0], 2 * sent[0], sent[0] // 2]


def ranks_that_place_otherwise(rank: Rank) -> None:
    """The plan's hash does not cover it, and splits of another length would abort the first exchange."""
    settings = settings_of(placement="spread" if rank.rank == 2 else "packed")
    refusal(ValueError, lambda: engine_of(settings), 'placement is "packed" on rank 0, 1, 3 and "spread" on rank 2')


def plan_given_back(rank: Rank) -> None:
    """The file's ranks are those of another run: replicas go where this run's config and nodes say."""
    engine = engine_of(settings_of(placement="spread"))
    assert engine.plan.subnetwork_of_rank == (0, 1, 0, 1)
    path = str(rank.folder / "plan.json")
    if rank.rank == 0:
        engine.plan.save(path)
    gathered(None)
    block: dict[str, Any] = {"subnetworks": "auto", "assignment": path}
    again = engine_of(settings_of(**block))
    assert (again.plan.hash, again.plan.subnetwork_of_rank) == (engine.plan.hash, (0, 0, 1, 1))
    assert engine_of(settings_of(placement="spread", **block)).plan == engine.plan


def checkpoints(rank: Rank) -> None:
    """They resume on the same placement bit for bit, and load on another."""
    folder = str(rank.folder)
    spread, packed = (
        settings_of(regime="backward", placement=name) | {"optimizer": config()["optimizer"]}
        for name in ("spread", "packed")
    )
    engine = engine_of(spread)
    train(engine, num_steps=1)
    engine.save_checkpoint(folder)
    train(engine, num_steps=1, first=1)
    again = engine_of(spread)
    again.load_checkpoint(folder)
    train(again, num_steps=1, first=1)
    assert_identical(dense_state(again), dense_state(engine))
    moved = engine_of(packed)
    moved.load_checkpoint(folder)
    again.load_checkpoint(folder)
    assert moved.plan.subnetwork_of_rank != again.plan.subnetwork_of_rank
    assert_identical(dense_state(moved), dense_state(again))


def dense_model(rank: Rank) -> None:
    """Evaluated and saved whole, and without Transformers' knowing of us."""
    from transformers import AutoModelForCausalLM

    engine = engine_of(settings_of(strategy="neuron", placement="spread"))
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
    yield from CASES.items()
    for check in (
        one_subnetwork_is_data_parallelism,
        auto_looks_at_the_nodes,
        bytes_per_element,
        ranks_that_place_otherwise,
        plan_given_back,
        checkpoints,
        dense_model,
    ):
        yield check.__name__, check


@pytest.mark.checks(SIZE, _checks, slow=["4-*-mixed", "4-all*", "4-one-*", "4-dense_model"])
def test_replicas(outcome: str | None) -> None:
    assert outcome is None, outcome


def test_cases_have_everything() -> None:
    """Modes, stages and counts of subnetworks and holders."""
    cases = list(CASES.values())
    assert {(case.case.regime, case.case.strategy) for case in cases} >= set(MODES)
    assert {case.case.stage for case in cases} == {0, 1, 2}
    assert {(case.num_subnetworks, case.case.holders) for case in cases} == {(2, 1), (2, 2), (1, 1)}
    placed = {(case.case.regime, case.block.get("placement")) for case in cases if case.case.holders < 2}
    assert placed >= {(regime, name) for regime in ("forward", "backward") for name in ("packed", "spread")}
    assert all(case.case == replace(case.case, ranks=SIZE) for case in cases)
