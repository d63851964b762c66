"""Errors that a user can act on end the program with one message, told by one rank, without a traceback."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdp_deepspeed.command_parser import USER_ERROR_EXIT_CODE

BROKEN_RUN_EXIT_CODE = 1
# The launcher ends all ranks of its node within two seconds after the first has failed; rank 0 usually says the same as
# we would. Less than GRACE_SECONDS of distributed/lifeline.py, after which a rank on another node ends without its own.
_SECONDS_TO_LET_RANK_0_SPEAK = 15.0


class RunFolderError(RuntimeError):
    """A file of the run cannot be written, as on a full disk; the message names it, the reason and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """RunFolderError instead of the block's OSError."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; make it possible (space, permissions) and start the same "
            "command again: it resumes at the last checkpoint"
        ) from None


@contextmanager
def exit_on_user_error(*errors: type[Exception]) -> Iterator[None]:
    """End the process when the block raises ValueError, OSError or one of `errors`: for set-up only.

    Inside the training loop a ValueError is our bug and keeps its traceback.
    """
    with exit_on(ValueError, OSError, *errors, code=USER_ERROR_EXIT_CODE):
        yield


@contextmanager
def exit_on(*errors: type[Exception], code: int = BROKEN_RUN_EXIT_CODE) -> Iterator[None]:
    """End the process with `code` when the block raises one of `errors`.

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
        sys.exit(code)
