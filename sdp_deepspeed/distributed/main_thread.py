"""Where the main thread is, for others to know: who waits in a collective of PyTorch's own cannot say so."""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any


def is_in_barrier(dist: Any) -> bool:
    """Whether the main thread waits in `torch.distributed.barrier` of all ranks; called in another thread.

    Args:
        dist: `torch.distributed`.
    """
    code = inspect.unwrap(dist.barrier).__code__
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("group") in (None, dist.group.WORLD)
