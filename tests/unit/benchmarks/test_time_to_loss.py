"""The time to a loss by hand: who trains what, and where a curve is low enough."""

from __future__ import annotations

import argparse
from fractions import Fraction

import pytest

from benchmarks.tables.time_to_loss import crossing
from benchmarks.time_to_loss import RUNS, config_of
from sdp_deepspeed.config import KEY

OPTIONS = argparse.Namespace(steps=150, bucket=2e5, micro_batch=1, rate=3e-3)
OURS = {"regime": "forward", "strategy": "block"}


def test_who_trains() -> None:
    """As the table's rows say: DDP without DeepSpeed; stages 1 and 2; half the depth for twice the steps."""
    found = {
        name: (run.contestant and run.contestant.stage, run.shape["num_hidden_layers"]) for name, run in RUNS.items()
    }
    assert found == {
        "DDP": (None, 6),
        "zero1": (1, 6),
        "zero2": (2, 6),
        "zero2, half the depth": (2, 3),
        "sdp C=1": (2, 6),
        "sdp C=1/2, then dense": (2, 6),
    }
    plain = {name for name, run in RUNS.items() if run.contestant is None or run.contestant.mode is None}
    assert plain == {name for name in RUNS if not name.startswith("sdp")}


def held(name: str, num_steps: int) -> list[tuple[Fraction, Fraction]]:
    """Coverage, and share of the steps with it."""
    config = config_of(RUNS[name], num_steps, OPTIONS)
    block = config.get(KEY, {"coverage": 1.0})
    if KEY in config:
        assert {key: block[key] for key in OURS} == OURS
    if "schedule" not in block:
        return [(Fraction(block["coverage"]), Fraction(1))]
    assert block["total_steps"] == num_steps
    found, begin = [], Fraction(0)
    for phase in block["schedule"]:
        end = Fraction(phase.get("until", 1))
        found.append((Fraction(phase["coverage"]), end - begin))
        begin = end
    return found


@pytest.mark.parametrize("name", [name for name in RUNS if name != "DDP"])
def test_all_do_about_the_same_operations(name: str) -> None:
    """Layers that are run, times steps: what 150 steps of six layers are. Half of them for half of the steps."""
    run = RUNS[name]
    num_steps = int(OPTIONS.steps * run.steps)
    phases = held(name, num_steps)
    assert sum(part for _, part in phases) == 1
    assert num_steps * run.num_layers * sum(coverage * part for coverage, part in phases) == 150 * 6
    if name == "sdp C=1/2, then dense":
        assert (num_steps, phases) == (200, [(Fraction(1, 2), Fraction(1, 2)), (Fraction(1), Fraction(1, 2))])


def test_a_crossing_by_hand() -> None:
    """From 3 to 2 in 10 steps of half a second; 2.25 is three quarters of the way. Later rises do not matter."""
    curve = [[10, 4.0, 3.0], [20, 9.0, 2.0], [30, 14.0, 2.5]]
    assert crossing(curve, 2.25) == (17.5, 7.75)
    assert crossing(curve, 2.0) == (20, 9.0)
    assert crossing(curve, 3.0) == (10, 4.0)
    assert crossing(curve, 1.9) is None
