"""The engine agrees with the reference: a sample that has every pair of settings, or with `--full` a thousand cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import SIZES, cases


def is_full(config: pytest.Config) -> bool:
    return bool(config.getoption("--full"))


def _cases(size: int, config: pytest.Config) -> list[tuple[str, Any]]:
    """DeepSpeed never forgets a group of AutoTP's: those cases come last."""
    found = [case for case in cases(full=is_full(config)) if case.ranks == size]
    return [(str(case), CaseCheck(case)) for case in sorted(found, key=lambda case: case.tensor_parallel)]


@pytest.mark.gpu
@pytest.mark.checks(SIZES, _cases)
def test_engine_agrees_with_the_reference(outcome: str | None) -> None:
    assert outcome is None, outcome
