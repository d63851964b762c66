"""Collectives that are not known are not counted as nothing."""

from __future__ import annotations

import pytest

from benchmarks.common.traffic_counter import sent_bytes


def test_unknown_collectives_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'new_collective_'.*sent_bytes"):
        sent_bytes("new_collective_", {}, 2, 0)
