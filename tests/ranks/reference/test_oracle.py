"""The engine agrees with the reference: a pairwise sample, or `--full-grid`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import oracle
from tests.helpers.oracle_grid import SIZES


def _cases(size: int, config: pytest.Config) -> list[tuple[str, Any]]:
    return list(oracle.cases(size, full=config.getoption("--full-grid")))


@pytest.mark.gpu
@pytest.mark.checks(SIZES, _cases)
def test_engine_agrees_with_the_reference(outcome: str | None) -> None:
    assert outcome is None, outcome
