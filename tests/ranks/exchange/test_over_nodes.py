"""Ranks on three nodes of 3, 2 and 1: they train what the reference says, and little crosses between nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.config import MODES
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.models import llama
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, engine_of, gathered, sgd, train

NODES = (0, 1, 0, 2, 1, 0)
SIZE = len(NODES)


@contextmanager
def on_nodes(rank: Rank) -> Iterator[None]:
    """The launcher's number of a node decides, since all ranks of this test are on one host."""
    os.environ["GROUP_RANK"] = str(NODES[rank.rank])
    try:
        yield
    finally:
        del os.environ["GROUP_RANK"]


@dataclass(frozen=True)
class OverNodes:
    """A case on these nodes, as a check."""

    case: Case
    block: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> None:
        with on_nodes(rank):
            check_case(self.case, rank, **self.block)


CASES = {
    "forward-block": OverNodes(Case(SIZE, 3, buckets="many", overlap=True)),
    "forward-neuron": OverNodes(Case(SIZE, 2, "forward", "neuron", stage=2, accumulation=3, overlap=True)),
    "forward-block-0": OverNodes(Case(SIZE, 2, stage=0, buckets="many")),
    "backward-block-0": OverNodes(Case(SIZE, 2, "backward", stage=0, overlap=True)),
    "backward-block": OverNodes(Case(SIZE, 2, "backward", precision="bf16+fp32", optimizer="SGD")),
    "backward-neuron": OverNodes(Case(SIZE, 4, "backward", "neuron", stage=2, buckets="many")),
    "replicas": OverNodes(Case(SIZE, 1, "forward", "neuron", stage=1), {"subnetworks": 3}),
}


def bytes_between_nodes_are_the_least(rank: Rank) -> None:
    """What is counted in a step is the least possible, but for messages whose length is rounded up: of 1,024 elements
    or more, to multiples of 64."""
    for stage, regime in ((0, "forward"), (1, "forward"), (2, "backward")):
        with on_nodes(rank):
            settings = sgd(stage=stage, regime=regime, holders=2)
            engine = engine_of(settings | {"bf16": {"enabled": True}})
        train(engine, num_steps=1)
        crossed = list[int]()
        engine.dp_group.all_to_all = _noting_crossed(engine.dp_group.all_to_all, rank, crossed)
        train(engine, num_steps=1)
        least, counted = bytes_between_nodes(engine.plan), sum(gathered(sum(crossed)))
        assert 0 < least <= counted <= 1.02 * least, (stage, regime)
        if regime == "forward":  # the dense model: each unit once to each node without a holder
            crossed.clear()
            dense_state(engine)
            counted = sum(gathered(sum(crossed)))
            least = sum(2 * elements_of(engine.plan, unit) * nodes_without(engine.plan, unit) for unit in range(4))
            assert 0 < least <= counted <= 1.02 * least, stage


def links_carry_messages(rank: Rank) -> None:
    """Over several nodes the exchange's bytes are messages, of which receives are posted first; on one they are not."""
    figures = []
    for place in (on_nodes(rank), nullcontext()):
        with place:
            engine = engine_of(sgd(holders=2))
        train(engine, num_steps=1)
        with TrafficCounter() as counter:
            train(engine, num_steps=1)
        figures.append(counter.bytes_by_operator)
    several, one = figures
    assert several["send"] > 1000 > several["alltoall_base_"] == one["send"] == 0
    assert one["alltoall_base_"] > 1000


def bytes_between_nodes(plan: Plan) -> int:
    """Of a step in bf16: a unit on m of three nodes crosses m - 1 times to its owner, and m - 1 or 2 times back."""
    parts = [(elements_of(plan, unit), nodes_without(plan, unit)) for unit in range(len(plan.units))]
    shared = sum(parameter.numel() for parameter in llama().parameters()) - sum(elements for elements, _ in parts)
    back = 0 if plan.regime == "backward" else 1
    return 2 * sum(elements * ((2 - without) + (2 - without * back)) for elements, without in [*parts, (shared, 0)])


def elements_of(plan: Plan, unit: int) -> int:
    shapes = {name: parameter.shape for name, parameter in llama().named_parameters()}
    return sum(piece.num_elements(shapes[piece.parameter]) for piece in plan.units[unit].pieces)


def nodes_without(plan: Plan, unit: int) -> int:
    return len({*NODES} - {NODES[rank] for rank in plan.ranks_of(unit)})


def _noting_crossed(all_to_all: Callable[..., Any], rank: Rank, crossed: list[int]) -> Callable[..., Any]:
    def noting(received: torch.Tensor, sent: torch.Tensor, received_splits: Any, sent_splits: Any) -> Any:
        elsewhere = [n for peer, n in enumerate(sent_splits) if NODES[peer] != NODES[rank.rank]]
        crossed.append(sum(elsewhere) * sent.element_size())
        return all_to_all(received, sent, received_splits, sent_splits)

    return noting


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield from CASES.items()
    yield "bytes", bytes_between_nodes_are_the_least
    yield "messages", links_carry_messages


@pytest.mark.checks(SIZE, _checks, slow=["6-few*", "6-replicas", "6-bytes", "6-messages", "*-block-0"])
def test_over_nodes(outcome: str | None) -> None:
    assert outcome is None, outcome


def test_cases_have_everything() -> None:
    cases = [over.case for over in CASES.values()]
    assert {(case.regime, case.strategy) for case in cases} >= {mode for mode in MODES if "mixed" not in mode}
    assert {(case.regime, case.stage) for case in cases} >= {(r, s) for r in ("forward", "backward") for s in (0, 1, 2)}
