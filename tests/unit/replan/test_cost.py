"""What a re-plan cost, of all ranks."""

from __future__ import annotations

import time
from typing import Any

from sdp_deepspeed.replan.cost import Moved, Replanned
from tests.helpers.gatherers import outcomes_of


def test_sums_of_all_ranks() -> None:
    own = [Moved(sent=3000, asked=10, least=2000), Moved(sent=1000, asked=500, least=1900)]

    def work(rank: int, objects: Any) -> Replanned:
        return Replanned.of(own[rank], objects, begin=time.monotonic() - 100)

    found = outcomes_of(2, work)
    assert [result.sent_bytes for result in found] == [3000, 1000]
    for result in found:
        assert (result.all_sent_bytes, result.all_asked_bytes, result.least_bytes) == (4000, 510, 3900)
        assert 100 <= result.seconds < 200
        assert str(result).endswith(" s: 4.00 kB moved, of which 3.90 kB had to; 510 bytes asked for them")
