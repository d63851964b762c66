"""How fast workers mix: the spectral gap of the gossip matrix of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.plan.assignment.graph import incidence, is_connected


def spectral_gap(holders: Sequence[Sequence[int]], weights: Sequence[int], k: int) -> float:
    """rho = 1 - lambda_2 of the gossip matrix (defined in plan/README.md).

    Args:
        holders: for each unit its subnetworks.
        weights: for each unit its trainable elements.
        k: number of subnetworks.

    Returns:
        0.0 when the graph of subnetworks and (weighted) units falls apart, 1.0 when all hold everything.
    """
    if k == 1:
        return 1.0
    trained = [(h, w / len(h)) for h, w in zip(holders, weights, strict=True) if w > 0]
    table = incidence([h for h, _ in trained], k)
    if not is_connected(table):
        return 0.0
    shares = np.array([share for _, share in trained], dtype=np.float64)
    overlaps: NDArray[np.float64] = (table.T * shares) @ table
    return gap_of_overlaps(overlaps)


def gap_of_overlaps(overlaps: NDArray[np.float64]) -> float:
    """rho of the weights that pairs of subnetworks share, [k, k] with k > 1; a factor of all of them cancels."""
    row_sums = overlaps.sum(axis=1)
    if not row_sums.all():  # a subnetwork that holds nothing
        return 0.0
    # W is not symmetric when loads differ, but is similar to this symmetric matrix: same eigenvalues, all real.
    eigenvalues = np.linalg.eigvalsh(overlaps / np.sqrt(np.outer(row_sums, row_sums)))
    return float(min(1.0, max(0.0, 1.0 - eigenvalues[-2])))
