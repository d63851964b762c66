"""`engine.replan` and schedules on two workers of two tensor-parallel ranks: as in test_replan.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests.helpers.models import MIXED
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, check_sequence
from tests.helpers.tensor_parallel_models import OWN_SPECS, TP, Divided, OwnModel, build, describe_own, mpu
from tests.helpers.training import refusal

Check = Callable[[Rank], None]
NEURON, BACKWARD, CHECKED = {"strategy": "neuron"}, {"regime": "backward"}, {"check_agreement": True}


def divided(
    model: str, *phases: Phase, precision: str = "fp32", settings: Mapping[str, Any] | None = None
) -> Sequence_:
    tensor_parallel = {"autotp_size": TP, **(settings or {}).get("tensor_parallel", {})}
    return Sequence_(4, phases, precision, model=partial(build, model), config={"tensor_parallel": tensor_parallel})


def of_its_author() -> nn.Module:
    describe_own()
    return OwnModel(mpu().get_model_parallel_group())


def with_mpu() -> dict[str, Any]:
    return {"mpu": mpu()}


SEQUENCES = {
    "modes_and_stages": divided(
        "llama_biases",
        Phase(CHECKED, 1),
        Phase(NEURON, 2),
        Phase(BACKWARD | NEURON, 0),
        Phase(BACKWARD | {"seed": 2}, 1),
    ),
    "sums_of_partial_gradients": divided(
        "qwen3",
        Phase(NEURON | CHECKED, 1),
        Phase({"holders": 2}),
        Phase(BACKWARD | NEURON, 2),
        precision="bf16",
        settings=OWN_SPECS,
    ),
    "uneven_vocabulary": divided("qwen2_61", Phase(CHECKED, 1), Phase({"strategy": MIXED}), Phase(BACKWARD, 0)),
    "of_its_author": Sequence_(
        4,
        [Phase(CHECKED, 1), Phase(NEURON), Phase(BACKWARD | NEURON, 2), Phase({"holders": 2})],
        model=of_its_author,
        options=with_mpu,
    ),
}
GROWING = [
    {"until_step": 1, "stage": 1},
    {"until_step": 3, "strategy": "block", "stage": 2},
    {"holders": 2, "stage": 0},
]
SCHEDULES = [
    Divided("qwen3", {"regime": regime, "strategy": "neuron", "holders": 1, "schedule": GROWING}, num_steps=4)
    for regime in ("forward", "backward")
]


def a_stage_that_shards_cannot_have(rank: Rank) -> None:
    """As at start."""
    run = SEQUENCES["uneven_vocabulary"]
    engine = run.engine(Phase({}), 1)
    refusal(ValueError, lambda: engine.replan({}, stage=2), "zero_optimization.stage: got 2", "do not divide")
    assert engine.zero_optimization_stage() == 1
    run.train(engine, 1)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for name, run in SEQUENCES.items():
        yield name, partial(check_sequence, run)
    for case in SCHEDULES:
        yield f"schedule-{case}", case
    yield "a_stage_that_shards_cannot_have", a_stage_that_shards_cannot_have


@pytest.mark.checks(4, _cases, slow=["4-of_its_author", "4-sums*", "4-uneven*", "4-schedule*"])
def test_replan_parallel(outcome: str | None) -> None:
    assert outcome is None, outcome
