"""Links by hand: the line through times, and how one is used."""

from __future__ import annotations

import pytest

from benchmarks.common.links import BURST, Link, fitted, lines_of, rate, use
from benchmarks.tables.readme import ROOT


def test_a_collective_takes_its_latency_and_its_bytes() -> None:
    assert Link(0.5, 10.0).seconds(40, 3) == 3 * 0.5 + 4


def test_the_line_through_times() -> None:
    """Exact where they are on one; else small messages weigh as much as large ones, so that neither end is off by
    more than the other in proportion."""
    line = fitted({n: 0.25 + n / 8 for n in (1, 10, 1000)})
    assert line.latency == pytest.approx(0.25)
    assert line.bandwidth == pytest.approx(8)
    off = fitted({1: 2.0, 1000: 1000.0, 2000: 2200.0})
    assert off.seconds(1) == pytest.approx(2.0, rel=0.01)
    assert off.seconds(2000) == pytest.approx(2200.0, rel=0.1)


def test_no_collective_ends_before_it_begins() -> None:
    """The steep line through these would begin below nothing. That through the origin with the least error in
    proportion has n seconds where (1 - n) and (2 - n) / 2 are smallest together: 1.2 n, and 2.4 at the other end."""
    line = fitted({1: 1.0, 2: 4.0})
    assert line.latency == 0
    assert line.seconds(1) == pytest.approx(1.2)
    assert line.seconds(2) == pytest.approx(2.4)
    faster = fitted({1: 1.0, 2: 0.5})
    assert (faster.latency, faster.bandwidth > 0) == (0, True), "bytes take time"


def test_messages_that_the_burst_carries_do_not_count() -> None:
    """As over a link of 10 bytes a second after the burst, of which a byte more would still be all free."""
    free = {BURST // 2: 0.001, BURST: 0.001, 2 * BURST: 0.001}
    medians = free | {n * BURST: n * BURST / 10 for n in (8, 32)}
    assert fitted(medians, above=2 * BURST).seconds(100) == pytest.approx(10.0)
    sizes = {str(n): [9e9, seconds, 0.0] for n, seconds in medians.items()}
    assert lines_of({"all_reduce": sizes})["all_reduce"].seconds(100) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="two sizes above 262144 bytes, and got"):
        lines_of({"all_reduce": {n: [1.0] for n in free}})
    script = (ROOT / "benchmarks/namespaces.sh").read_text(encoding="utf-8")
    assert f"burst {BURST // 1024}kb " in script


def test_rates_as_tc_takes_them() -> None:
    assert (rate("1gbit"), rate("250mbit")) == (125e6, 31.25e6)


def test_the_use_of_a_link_over_time() -> None:
    """Looks at 0, 1, 3, 4 and 8 seconds; the highest rate is 100 a second, so that less than 10 is nothing."""
    looks = [(0.0, 0, 0), (1.0, 100, 90), (3.0, 300, 92), (4.0, 301, 112), (8.0, 330, 112)]
    assert use(looks) == {"both": 1.0, "one": 3.0, "none": 4.0}
