"""Collectives that read and write late, on streams of their own, change no value; on a GPU only.

What has no order is seen by its values: what is sent is overwritten before it was read, what is received is read before
it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from sdp_deepspeed.config import MODES, Mode
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Place, Rank, run_ranks
from tests.helpers.staged_gloo import StagedGloo

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class WithLateStreams:
    """A case.

    Args:
        is_waited_for: whether a collective's `wait` does what it must; without it, values must be wrong.
    """

    case: Case
    is_waited_for: bool = True

    def __call__(self, rank: Rank) -> None:
        with (
            mock.patch.object(StagedGloo, "is_late", True),
            mock.patch.object(StagedGloo, "is_waited_for", self.is_waited_for),
        ):
            check_case(self.case, rank)


@pytest.mark.gpu
@pytest.mark.world(4)
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_on_real_streams(rank: Rank, mode: Mode, stage: int, accumulation: int) -> None:
    if not torch.cuda.is_available():
        return  # these streams are a GPU's
    case = Case(4, 2, *mode, stage=stage, overlap=True, accumulation=accumulation, buckets="many")
    WithLateStreams(case)(rank)


@pytest.mark.gpu
def test_values_are_wrong_where_nothing_is_waited_for(place: Place, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--gpu"):
        pytest.skip("needs a GPU: --gpu")
    check = WithLateStreams(Case(4, 2, stage=1, buckets="many"), is_waited_for=False)
    outcome = str(run_ranks(4, [("without", check)], place=place)["without"])
    assert "AssertionError" in outcome or "training has diverged" in outcome
