"""Where the main thread is, for others to know: who waits in a collective of PyTorch's own cannot say so."""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

# Those that hosts meet in between steps: of losses, of numbers of tokens, before a save.
_COLLECTIVES = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")


def stuck_in(dist: Any) -> str:
    """The collective of all ranks in which the main thread waits, or nothing; called in another thread.

    Args:
        dist: `torch.distributed`.
    """
    codes = {inspect.unwrap(getattr(dist, name)).__code__: name for name in _COLLECTIVES}
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    of_all = frame is not None and frame.f_locals.get("group") in (None, dist.group.WORLD)
    return codes[frame.f_code] if frame is not None and of_all else ""
