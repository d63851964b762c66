"""At C = 1 the engine is data parallelism: plain DeepSpeed ZeRO-0, 1 and 2 on the same data agree with it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import deepspeed
import pytest

from tests.helpers.models import batches, without_block
from tests.helpers.oracle import compare_weights, loss_tolerance, optimizer_of, rounding, scheduler_of, start
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, micro_step

NUM_STEPS = 7
SGD: dict[str, Any] = {"optimizer": "SGD", "groups": 1}
OVERLAP: dict[str, Any] = {"overlap": True, "buckets": "many"}  # so that several leave during backward
CASES = (  # each stage in each regime and with each strategy
    Case(2, 2, stage=0, accumulation=3, scheduler="warmup"),
    Case(2, 2, stage=1, accumulation=3, precision="bf16", **SGD),
    Case(2, 2, "forward", "neuron", stage=1, accumulation=3, scheduler="warmup"),
    Case(2, 2, stage=2, accumulation=3, precision="bf16+fp32", **SGD, **OVERLAP),
    Case(2, 2, "backward", "neuron", stage=2, accumulation=3, **OVERLAP),
    Case(3, 3, "backward", "neuron", stage=0, precision="bf16", **SGD),
    Case(3, 3, stage=1),
    Case(3, 3, "backward", stage=1, accumulation=3, clip=0.0, precision="bf16+fp32", **SGD),
    Case(3, 3, "forward", "neuron", stage=2, accumulation=3, **OVERLAP),
)


def plain_engine(case: Case) -> Any:
    model = case.specimen.build()
    optimizer = optimizer_of(case, dict(model.named_parameters()))
    scheduler = partial(scheduler_of, case) if case.scheduler != "none" else None
    settings = without_block(case.config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, lr_scheduler=scheduler)
    assert type(engine).__name__ == "DeepSpeedEngine"
    return engine


def compare_norm(case: Case, norm: float, expected: Any) -> None:
    """fp32: sums in another order. bf16: ZeRO reduces in bf16, so each element may be off by 2**-8 per addition over
    ranks and over micro-steps. Stock stage 0 in fp32 keeps no norm."""
    if expected is None:
        assert (case.stage, case.precision) == (0, "fp32")
        return
    tolerance = 1e-5 if case.precision == "fp32" else 3 * rounding(case)
    assert abs(norm - float(expected)) <= tolerance * norm, (norm, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "case"), [(case.ranks, case) for case in CASES], ids=map(str, CASES))
def test_full_coverage_is_plain_deepspeed(rank: Rank, case: Case) -> None:
    ours, plain = start(case, case.specimen.build(), check_agreement=True), plain_engine(case)
    initial = dense_state(plain)
    for step in itertools.islice(batches(rank.size, case.accumulation), NUM_STEPS):
        for batch in step[rank.rank]:
            loss, expected = micro_step(ours, batch), micro_step(plain, batch)
            assert abs(loss - expected) <= loss_tolerance(case), (loss, expected)
        compare_norm(case, ours.get_global_grad_norm(), plain.get_global_grad_norm())
        assert ours.get_lr() == plain.get_lr()
    compare_weights(case, dense_state(ours), plain.module, initial)
    assert ours.global_steps == plain.global_steps == NUM_STEPS
    assert ours.global_samples == plain.global_samples
