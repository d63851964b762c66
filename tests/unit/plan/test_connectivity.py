"""Connection of the table of units by subnetworks."""

from __future__ import annotations

import pytest

from sdp_deepspeed.plan.connectivity import spectral_gap


def test_gap_by_hand() -> None:
    """Three subnetworks, each pair shares one unit: W = (2 I + (J - I)) / 4 has eigenvalues 1, 1/4, 1/4. Unequal units:
    both hold one of weight 1, the first alone one of weight 2: eigenvalues 1 and 1/3. Different p: 1, 1/2, 0."""
    assert spectral_gap(((0, 1), (1, 2), (0, 2)), [1] * 3, 3) == pytest.approx(0.75)
    assert spectral_gap(((0, 1), (0,)), [1, 2], 2) == pytest.approx(2 / 3)
    assert spectral_gap(((0, 1, 2), (0, 1), (2,)), [1] * 3, 3) == pytest.approx(0.5)
    assert spectral_gap(((0, 1, 2),) * 4, [1] * 4, 3) == pytest.approx(1.0)
    assert spectral_gap(((0,),), [1], 1) == 1.0
    for holders, weights in ((((0, 1), (2, 3)), [1, 1]), (((0, 1), (1, 2), (2, 3)), [1, 0, 1])):
        assert spectral_gap(holders, weights, 4) == 0.0
