"""Where the main thread is, for others to know: who waits in a collective of PyTorch's own cannot say so."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from types import FrameType
from typing import Any

# Those that hosts meet in between steps: of losses, of numbers of tokens, before a save.
_COLLECTIVES = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
_looking = threading.Lock()


def stuck_in(dist: Any) -> str:
    """The collective of all ranks in which the main thread waits, or nothing; called in another thread.

    Args:
        dist: `torch.distributed`.
    """
    codes = {getattr(inspect.unwrap(getattr(dist, name)), "__code__", None): name for name in _COLLECTIVES}
    frame = _frame_of_main_thread()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    of_all = frame is not None and frame.f_locals.get("group") in (None, dist.group.WORLD)
    return codes[frame.f_code] if frame is not None and of_all else ""


def _frame_of_main_thread() -> FrameType | None:
    """Without garbage collection. Python before 3.11.9 holds its list of threads here: a finalizer that let another
    thread run, which starts one or ends, would have both wait for ever (python/cpython#106883)."""
    with _looking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(threading.main_thread().ident or 0)
        finally:
            if was_enabled:
                gc.enable()
