"""The engine agrees with the reference (DESIGN.md section 7): a pairwise sample, or `--full-grid`."""

from __future__ import annotations

from typing import Any

import oracle
import pytest


def _cases(size: int, config: pytest.Config) -> list[tuple[str, Any]]:
    return list(oracle.cases(size, full=config.getoption("--full-grid")))


@pytest.mark.ranks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome


@pytest.mark.ranks(3, _cases)
def test_three_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome


@pytest.mark.ranks(4, _cases)
def test_four_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
