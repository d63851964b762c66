"""Users' mistakes that are found once the ranks run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError that all ranks have is one line of the first, and the end."""
    try:
        yield
    except ValueError as error:
        raise SystemExit(f"error: {error}" if dist.get_rank() == 0 else 2) from None
