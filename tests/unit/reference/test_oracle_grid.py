"""What the oracle's sample must have, and which of its cases cannot be."""

from __future__ import annotations

import itertools
import warnings
from functools import cache

import pytest
from torch import nn

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.support.combinations import AXES
from tests.helpers import more_models, oracle
from tests.helpers.models import SPECIMENS
from tests.helpers.oracle_grid import (
    SIZES,
    Case,
    allowed_combinations,
    full_grid,
    num_scarce_units,
    other_families,
    pairs_of,
    possible,
    sample,
)


@pytest.mark.slow
def test_every_model_is_trained_in_every_mode() -> None:
    found = {(case.model, case.regime, case.strategy) for case in sample() if case.holders < case.num_subnetworks}
    assert found == set(itertools.product(SPECIMENS, ("forward", "backward"), ("block", "neuron", "mixed")))


def test_every_other_family_is_trained_on_ranks_with_neurons_if_it_can() -> None:
    """In all modes in one process: tests/unit/architectures/test_more_families.py."""
    lacking = [case for case in other_families() if case.holders < case.num_subnetworks]
    names = more_models.SPECIMENS.keys() - set(more_models.TWINS)
    assert {case.model for case in lacking} == names
    assert {(case.regime, case.strategy) for case in lacking} == {
        *itertools.product(("forward", "backward"), ("block", "neuron"))
    }
    assert {case.model for case in other_families() if case.strategy == "neuron"} == (names - set(more_models.UNCUT))
    assert all(map(possible, other_families(full=True)))
    modes = {(case.model, case.regime, case.strategy) for case in other_families(full=True)}
    assert {(case.model, case.regime, case.strategy) for case in other_families()} < modes


def test_the_grid_is_every_allowed_combination() -> None:
    grid = [case for size in SIZES for case in full_grid(size)]
    assert {case.combination for case in grid} == set(allowed_combinations())
    assert len({str(case) for case in grid}) == len(set(grid))
    for case in grid[::97]:
        ours, combination = oracle.deepspeed_config(case), case.combination.config(case.ranks, case.holders)
        assert {key: ours[key] for key in combination if key not in ("zero_optimization", "fp16", KEY)} == {
            key: value for key, value in combination.items() if key not in ("zero_optimization", "fp16", KEY)
        }
        assert ours["zero_optimization"].items() >= combination["zero_optimization"].items()
        assert ours[KEY].items() >= combination[KEY].items()


def test_every_pair_of_settings_is_in_the_sample() -> None:
    everything = pairs_of([case for size in SIZES for case in full_grid(size)])
    assert everything == pairs_of(sample())
    assert {(size, holders) for size in SIZES for holders in range(1, size + 1)} <= everything
    axes = {name: values for name, values in AXES.items() if name not in ("regime", "strategy", "accumulation")}
    missing = {
        pair
        for one, other in itertools.combinations(sorted(axes), 2)
        for pair in itertools.product(*([(name, value) for value in axes[name]] for name in (one, other)))
        if ("lacking", pair) not in everything
    }
    # What is refused, and what leaves one subnetwork on four ranks: that has nothing to lack.
    assert missing == {
        (("offload", "cpu"), ("stage", 0)),
        (("precision", "bf16+fp32"), ("stage", 0)),
        (("replicas", 2), ("tensor_parallel", 2)),
    }
    assert (("replicas", 2), ("tensor_parallel", 2)) in everything
    for mode in itertools.product(("forward", "backward"), ("block", "neuron", "mixed")):
        for trait in itertools.chain(*([(name, value) for value in axes[name]] for name in axes)):
            assert ("lacking", (("mode", " ".join(mode)), trait)) in everything


@pytest.mark.slow
def test_sample_is_small_and_the_same_each_time() -> None:
    """Its size decides how long the suite takes; ranks of different processes must not choose differently."""
    assert len(sample()) <= 95
    full_grid.cache_clear()
    assert sample.__wrapped__() == sample()


@cache
def built(model: str) -> nn.Module:
    return SPECIMENS[model].build()


@pytest.mark.parametrize("model", SPECIMENS)
@pytest.mark.parametrize("strategy", ["block", "neuron", "mixed"])
def test_cases_are_left_out_when_no_plan_exists_only(model: str, strategy: str) -> None:
    """Too few units or heads is an error, one more holder is none; and with a plan every worker has its share."""
    for size, granularity in itertools.product(SIZES, ("sublayer", "layer") if strategy == "block" else ("sublayer",)):
        for holders in range(1, size + 1):
            case = Case(size, holders, "forward", strategy, model, granularity)
            block = parse({KEY: case.block})
            assert block is not None
            if not possible(case):
                with pytest.raises(ValueError, match="holders"):
                    plan_model(built(model), block, size)
                assert num_scarce_units(case) * holders < size
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plan, _ = plan_model(built(model), block, size)
            assert all(plan.units_of(subnetwork) for subnetwork in range(size))
