"""Errors that a user can act on end the program with one message, told by one rank, without a traceback."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

MISTAKE_EXIT_CODE = 2
BROKEN_RUN_EXIT_CODE = 1
# The launcher ends all ranks within two seconds after the first has failed; rank 0 usually says the same as we would.
_SECONDS_TO_LET_RANK_0_SPEAK = 15.0


@contextmanager
def reported_mistakes(*errors: type[Exception]) -> Iterator[None]:
    """End the process when the block raises ValueError, OSError or one of `errors`: for set-up only.

    Inside the training loop a ValueError is our bug and keeps its traceback.
    """
    with reported(ValueError, OSError, *errors, exit_code=MISTAKE_EXIT_CODE):
        yield


@contextmanager
def reported(*errors: type[Exception], exit_code: int = BROKEN_RUN_EXIT_CODE) -> Iterator[None]:
    """End the process when the block raises one of `errors`.

    Rank 0 speaks at once; another rank speaks only if it is still alive after some seconds, which means that rank 0
    had nothing to say.
    """
    try:
        yield
    except errors as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_SECONDS_TO_LET_RANK_0_SPEAK)
        prefix = "error" if rank == "0" else f"error on rank {rank}"
        print(f"{prefix}: {str(error).strip() or type(error).__name__}", file=sys.stderr, flush=True)
        sys.exit(exit_code)
