"""Convolutional models in the engine: beside the oracle in all modes and stages, and what becomes of their buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import Case

MODES = tuple(itertools.product(("forward", "backward"), ("block", "neuron")))


def oracle_cases(size: int) -> Iterator[Case]:
    """All modes and stages, on two ranks with one holder each, on three with two."""
    for (regime, strategy), stage in itertools.product(MODES, (0, 1, 2)):
        case = Case(size, size - 1, regime, strategy, "resnet", stage=stage)
        if size == 2:
            yield case
        else:
            yield Case(size, 2, regime, strategy, "resnet_bottleneck", stage=stage, accumulation=3, optimizer="SGD")
    if size == 2:
        for regime, strategy in MODES:
            yield Case(size, 1, regime, strategy, "resnet", stage=1, optimizer="SGD", precision="bf16", clip=0.1)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for case in oracle_cases(size):
        yield str(case), CaseCheck(case)


@pytest.mark.checks((2, 3), _cases)
def test_engine(outcome: str | None) -> None:
    assert outcome is None, outcome
