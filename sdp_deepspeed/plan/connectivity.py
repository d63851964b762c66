"""How a table of units by subnetworks connects the subnetworks: components of the graph, spectral gap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.units import Subnetworks

Ints = NDArray[np.int64]


def spectral_gap(holders: Sequence[Subnetworks], weights: Sequence[int], num_subnetworks: int) -> float:
    """1 - lambda_2 of W_ij = sum over units of w_u m_iu m_ju / p_u, rows normalized (docs/design.md).

    Args:
        weights: trainable elements of each unit; units without any do not connect subnetworks.

    Returns:
        0.0 if the graph of subnetworks and units is disconnected, 1.0 if every subnetwork holds everything.
    """
    k = num_subnetworks
    if k == 1:
        return 1.0
    shares: dict[Subnetworks, float] = {}
    for subnetworks, weight in zip(holders, weights, strict=True):
        shares[subnetworks] = shares.get(subnetworks, 0.0) + weight / len(subnetworks)
    sets = [subnetworks for subnetworks, share in shares.items() if share > 0]
    if num_components(sets, k) > 1:
        return 0.0
    table = incidence(sets, k)
    overlaps = (table.T * np.array([shares[subnetworks] for subnetworks in sets])) @ table
    # W is similar to this symmetric matrix.
    sums = overlaps.sum(axis=1)
    return float(np.clip(1.0 - np.linalg.eigvalsh(overlaps / np.sqrt(np.outer(sums, sums)))[-2], 0.0, 1.0))


def incidence(holders: Sequence[Subnetworks], num_subnetworks: int) -> Ints:
    """0/1 table of units by subnetworks, [U, k]."""
    table = np.zeros((len(holders), num_subnetworks), dtype=np.int64)
    rows = np.repeat(np.arange(len(holders)), [len(subnetworks) for subnetworks in holders])
    table[rows, [subnetwork for subnetworks in holders for subnetwork in subnetworks]] = 1
    return table


def num_components(holders: Iterable[Subnetworks], num_subnetworks: int) -> int:
    """Number of connected components of the bipartite graph of subnetworks and units."""
    components = [1 << subnetwork for subnetwork in range(num_subnetworks)]  # bit masks
    for subnetworks in dict.fromkeys(holders):
        mask = sum(1 << subnetwork for subnetwork in subnetworks)
        connected = [component for component in components if component & mask]
        if len(connected) > 1:
            components = [component for component in components if not component & mask] + [sum(connected)]
    return len(components)
