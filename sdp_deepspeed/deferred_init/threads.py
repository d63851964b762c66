"""How many threads a rank may keep busy while all ranks of its node start: its share of the cores that they may use.

Not OMP_NUM_THREADS, which launchers set to 1 whatever the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from fractions import Fraction

MOST = 16
"""More would wait for the states to begin at, and hold more tensors in the making."""


def own_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def num_threads(cores: Sequence[Collection[int]], rank: int) -> int:
    """A core that several ranks may use is divided between them.

    Args:
        cores: of each rank of the node.
        rank: among those.
    """
    sharing = [sum(core in other for other in cores) for core in cores[rank]]
    return max(1, min(MOST, int(sum(Fraction(1, count) for count in sharing))))
