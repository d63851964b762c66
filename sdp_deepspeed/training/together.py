"""What rank 0 does for all, with one outcome on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sdp_deepspeed.training.run_folder import RunFolderError

T = TypeVar("T")


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 alone; a collective of all ranks.

    Without it rank 0 would leave with an error and the others would die in their next collective, in C++.

    Returns:
        Rank 0's result on every rank; small and picklable.

    Raises:
        ValueError, OSError, RunFolderError: rank 0's, on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError, RunFolderError) as problem:
            outcome[1] = problem
    dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if error is not None:
        raise error
    return result
