"""Helpers for error messages."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Collection, Iterable

KEY = "subnetwork_data_parallel"  # of the block in a DeepSpeed config
MAX_LISTED = 5


def listed(values: Iterable[object], *, limit: int = MAX_LISTED, separator: str = ", ") -> str:
    """The first `limit` values, and the number of further ones: "a, b, c, d, e, +3 more"."""
    texts = [str(value) for value in values]
    more = [f"+{len(texts) - limit} more"] if len(texts) > limit else []
    return separator.join([*texts[:limit], *more])


def quoted(values: Iterable[object], *, limit: int = MAX_LISTED) -> str:
    """`listed` of the values' `repr`."""
    return listed(map(repr, values), limit=limit)


def did_you_mean(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str:
    """ "did you mean 'coverage'?", or all known names if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def announce(text: str, logger: logging.Logger) -> None:
    """Print a text on stdout at the hosts' default log level, warning, but not at a higher level of `logger`."""
    child = logger.getChild("announcements")
    if not child.handlers:
        child.propagate = False
        child.addHandler(logging.StreamHandler(sys.stdout))
    level = logger.getEffectiveLevel()
    child.setLevel(logging.INFO if level <= logging.WARNING else level)
    child.info(text)
