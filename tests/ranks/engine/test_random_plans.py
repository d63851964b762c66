"""Any table of holders trains as the reference does, on ranks that are late at random and on one node or two."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.config import MODES
from sdp_deepspeed.planner import plan_model
from tests.helpers.collective_log import check_order, collectives_of_engines
from tests.helpers.models import parsed
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import gathered


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(60 if metafunc.config.getoption("--full") else 5))


def drawn_case(draw: random.Random, size: int) -> Case:
    """Neurons that have other coverages than the rest of their branch are not scaled."""
    precision = draw.choice(("fp32", "bf16", "bf16+fp32"))
    return Case(
        size,
        1,
        *draw.choice(MODES),
        model=draw.choice(("llama", "gpt2")),
        stage=draw.choice((1, 2)),
        accumulation=draw.choice((1, 2)),
        optimizer="AdamW" if precision == "fp32" else "SGD",
        precision=precision,
        offload=draw.choice(("none", "cpu")),
        overlap=draw.choice((False, True)),
        buckets=draw.choice(("one", "many")),
        wire="weights" if precision == "fp32" else draw.choice(("weights", "fp32")),
        branch_scale="none",
    )


@pytest.mark.world(3, 4)
def test_random_plans(rank: Rank, seed: int) -> None:
    """Values are the reference's, there is no hang, and all ranks have one order of collectives."""
    draw = random.Random(f"{seed} of {rank.size} ranks")
    case = drawn_case(draw, rank.size)
    plan, _ = plan_model(case.specimen.build(), parsed(**case.block), rank.size)
    further = [draw.sample(range(rank.size), draw.randrange(rank.size)) for _ in plan.holders]
    holders = [tuple(sorted({*given, *more})) for given, more in zip(plan.holders, further, strict=True)]
    path = rank.folder / "plan.json"
    if rank.rank == 0:
        replace(plan, holders=tuple(holders)).save(path)
    dist.barrier()
    delays = random.Random(seed * 100 + rank.rank)
    with collectives_of_engines(lambda: time.sleep(delays.random() * 0.002)) as log:
        check_case(case, rank, assignment=str(path), holders=None)
    logs: list[Any] = gathered(log)
    assert check_order(logs) > 0
