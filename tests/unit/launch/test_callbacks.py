"""How often the programs look for signals to stop, which is a collective of all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from callbacks import StopTogether

LOCAL = {"local_steps": {"every": 10}}


@pytest.mark.parametrize(
    ("block", "every"),
    [
        (None, 1),
        ({"coverage": 0.5}, 1),
        ({"coverage": 1.0, **LOCAL}, 10),
        ({"coverage": 1.0, "schedule": [{"until_step": 50}, LOCAL]}, 10),
        ({"coverage": 1.0, "schedule": [{"until_step": 50, **LOCAL}, {}]}, 10),
    ],
)
def test_local_steps_of_any_phase_are_not_interrupted(block: dict[str, Any] | None, every: int) -> None:
    config = None if block is None else {"subnetwork_data_parallel": block}
    assert StopTogether(config).every == every
