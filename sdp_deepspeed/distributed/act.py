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
        lost: whether a collective has failed here, after which no other will come about.
        ended: whether the process ends, after which it starts no other.
        beat: how often the rank has published; where it does not move, the process is gone or stopped.
    """

    what: str
    seconds: float
    waits: bool
    call: int
    launched: int
    lost: bool
    ended: bool
    beat: int

    @property
    def is_away(self) -> bool:
        """Whether it will not come to a meeting that it has not come to."""
        return self.lost or self.ended

    def misses(self, call: int) -> bool:
        """Whether the collective of this number will not come about, for all that this rank does."""
        return self.lost or (self.ended and self.launched < call)

    @property
    def collective(self) -> tuple[str, int]:
        """In which it waits: calls of one number may still be others, in a step here and in a backward pass there."""
        return self.what, self.call

    def meets(self, other: Act | None) -> bool:
        """Whether another rank waits in this one's collective."""
        return other is not None and other.waits and other.collective == self.collective


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
