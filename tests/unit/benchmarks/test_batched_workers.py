"""All virtual workers in one pass have the numbers of one after the other, and cost what the method computes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.learning.batched_workers import BatchedReference
from benchmarks.learning.held_rows import scale_outputs
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model
from tests.helpers.models import LENGTH, MIXED, SPECIMENS, VOCABULARY, batches, loss_of, parsed
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.slow

Block = dict[str, Any]
DEPTH: Block = {"coverage": [{"profile": "linear", "first": 1.0, "last": 0.25}]}


def losses_of_rows(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def adamw(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-3)  # far above rounding


def plan_of(model: nn.Module, block: Block, num_ranks: int) -> Plan:
    return plan_model(model, parsed(**block), num_ranks)[0]


def both(name: str, blocks: Sequence[Block], num_ranks: int, **options: Any) -> tuple[Reference, BatchedReference]:
    """References of one model; each block of `blocks` holds from the step of its index on."""
    model = SPECIMENS[name].build()
    plans = dict(enumerate(plan_of(model, block, num_ranks) for block in blocks))
    arguments = (plans[0], adamw)
    options |= {"is_scaled": blocks[0].get("branch_scale") != "none"}
    slow = Reference(deepcopy(model), *arguments, loss_of, later=plans, **options)
    return slow, BatchedReference(model, *arguments, losses_of_rows, later=plans, **options)


def assert_agree(slow: Reference, fast: Reference, num_ranks: int, num_micro: int = 1, steps: int = 3) -> None:
    """Losses, norms and weights to rounding of sums in another order."""
    for given in itertools.islice(batches(num_ranks, num_micro), steps):
        (losses, norm), (expected, expected_norm) = fast.step(given), slow.step(given)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    for (name, value), other in zip(fast.model.named_parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5, msg=name)


SMALL = {"coverage": 0.5}
STRATEGIES = ("block", "neuron")
FINE: list[Block] = [{"strategy": strategy} | SMALL for strategy in (*STRATEGIES, MIXED)]
LAYERS: list[Block] = [{"granularity": "layer"} | SMALL]
UNSCALED = [block | {"branch_scale": "none"} for block in FINE]


@pytest.mark.parametrize("name", ["llama_biases", "gpt2", "gpt_neox_parallel"])
@pytest.mark.parametrize("block", [*FINE, *LAYERS, *UNSCALED], ids=lambda block: "-".join(map(str, block.values())))
def test_one_plan(name: str, block: Block) -> None:
    assert_agree(*both(name, [block], 4), 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_that_change(strategy: str) -> None:
    """Coverage that grows, by depth too, then everything; and the same coverage drawn anew."""
    own: Block = {"strategy": strategy}
    draws = [own | SMALL | {"seed": seed} for seed in range(3)]
    assert_agree(*both("llama", [own | {"coverage": 0.25}, own | DEPTH, own | {"coverage": 1.0}], 4), 4)
    slow, fast = both("llama", draws, 4)
    assert len({plan.hash for plan in fast.later.values()}) == 3
    assert_agree(slow, fast, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_counts(strategy: str) -> None:
    """One holder of each unit; three workers, two of which hold it; two replicas of each of two; two micro-batches."""
    own: Block = {"strategy": strategy}
    assert_agree(*both("llama", [own | {"holders": 1}], 4), 4)
    assert_agree(*both("gpt2", [own | {"holders": 2}], 3), 3, num_micro=2)
    assert_agree(*both("llama", [own | {"holders": 1, "subnetworks": 2}], 4), 4)


def flops_of(block: Block) -> int:
    _, fast = both("llama", [block], 4)
    with FlopCounter() as counter:
        fast.step(next(batches(4, 1)))
    return counter.total


def test_a_step_costs_what_the_method_computes() -> None:
    """At C = 1/2 half of the branches' work."""
    rows, width = 4 * 2, 16
    head = 6 * rows * LENGTH * width * VOCABULARY  # logits of all positions
    assert flops_of(SMALL) - head == (flops_of({"coverage": 1.0}) - head) / 2


def scaled_by_hand(weights: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """A Llama's output projections times their coverage, cell by cell."""
    values = {name: value.detach().clone() for name, value in weights.items()}
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        for piece in unit.pieces:
            is_output = ".o_proj." in piece.parameter or ".down_proj." in piece.parameter
            if is_output:
                piece.narrow(values[piece.parameter]).mul_(len(holders) / plan.num_subnetworks)
    return values


@pytest.mark.parametrize("block", [DEPTH, DEPTH | {"granularity": "layer"}, DEPTH | {"strategy": "neuron"}])
def test_scaled_outputs(block: Block) -> None:
    model = SPECIMENS["llama_biases"].build()
    plan = plan_of(model, block, 4)
    before = deepcopy(model.state_dict())
    expected = scaled_by_hand(dict(model.named_parameters()), plan)
    scale_outputs(model, plan)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    changed = [name for name, value in before.items() if not torch.equal(value, expected[name])]
    assert {name.split(".")[-2] for name in changed} == {"o_proj", "down_proj"}
    assert any("bias" in name for name in changed) == ("strategy" not in block)  # that of neurons is shared
