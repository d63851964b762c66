"""What a rank does, as it tells the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Act:
    """What a rank did last, when it published it.

    Args:
        what: in words.
        seconds: since it began to wait or, if it does not wait, to do this.
        waits: for others, in a collective.
        call: number of that collective.
        launched: how many it has started.
        stuck_in: name of the collective of all ranks, not of ours, that it waits in; empty if none.
        lost: whether a collective has failed here or the process ends, after which no other will come about.
        beat: how often the rank has published; where it does not move, the process is gone or stopped.
    """

    what: str
    seconds: float
    waits: bool
    call: int
    launched: int
    stuck_in: str
    lost: bool
    beat: int

    @property
    def collective(self) -> tuple[str, int]:
        """In which it waits: calls of one number may still be others, in a step here and in a backward pass there."""
        return self.what, self.call


Acts = Mapping[int, Act | None]  # by rank; None for one that has published nothing


def beat_of(act: Act | None) -> int | None:
    """Of a rank that has published something."""
    return None if act is None else act.beat


def act_in_words(act: Act | None) -> str:
    """After the rank's name and a comma."""
    if act is None:
        return "of which nothing is known"
    if act.waits:
        return f"which {act.what} and had waited {act.seconds:.0f} seconds when it was last heard of"
    return f"which {act.what}, {act.seconds:.0f} seconds before it was last heard of"
