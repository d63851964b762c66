"""The engine agrees with the reference: a sample that has every pair of settings, or with `--full` a thousand cases."""

from __future__ import annotations

import pytest

from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case, cases
from tests.helpers.ranks import Rank


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """DeepSpeed never forgets a group of AutoTP's: those cases come last."""
    found = sorted(cases(full=metafunc.config.getoption("--full")), key=lambda case: (case.ranks, case.tensor_parallel))
    metafunc.parametrize(("rank", "case"), [(case.ranks, case) for case in found], ids=map(str, found))


@pytest.mark.gpu
def test_engine_agrees_with_the_reference(rank: Rank, case: Case) -> None:
    check_case(case, rank)
