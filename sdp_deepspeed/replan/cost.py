"""What a re-plan cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.sizes import bytes_text


@dataclass(frozen=True)
class Moved:
    """Of one rank, in bytes.

    Args:
        sent: values, to others.
        asked: sent to say which values it needs.
        least: values that it had to get: what it has under the new plan and did not have before.
    """

    sent: int
    asked: int
    least: int


@dataclass(frozen=True)
class Replanned:
    """What a re-plan cost.

    Args:
        sent_bytes: values, by this rank.
        all_sent_bytes: by all ranks.
        all_asked_bytes: sent by all ranks to say which values they need.
        least_bytes: that all ranks together had to get: what each has under the new plan and did not have before.
        seconds: on this rank.
    """

    sent_bytes: int
    all_sent_bytes: int
    all_asked_bytes: int
    least_bytes: int
    seconds: float

    @classmethod
    def of(cls, own: Moved, ranks: Gatherer, *, begin: float) -> Replanned:
        """Every rank calls it.

        Args:
            begin: by `time.monotonic` of this rank.
        """
        of_ranks: list[Moved] = ranks.gather_objects(own)
        sent, asked, least = (sum(getattr(moved, name) for moved in of_ranks) for name in ("sent", "asked", "least"))
        return cls(own.sent, sent, asked, least, time.monotonic() - begin)

    def __str__(self) -> str:
        moved, least, asked = map(bytes_text, (self.all_sent_bytes, self.least_bytes, self.all_asked_bytes))
        return f"re-planned in {self.seconds:.2f} s: {moved} moved, of which {least} had to; {asked} asked for them"
