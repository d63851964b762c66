"""What a program's number of steps is written into, and what is left as it is."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.schedule import fill_total_steps

FRACTIONS = [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]


@pytest.mark.parametrize(
    "block",
    [
        {"schedule": [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0}]},
        {"schedule": [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0}], "total_steps": "auto"},
        {"schedule": FRACTIONS, "total_steps": 9},
        {"schedule": FRACTIONS, "enabled": False},
        {"schedule": [{"until": None, "until_step": 5}, {"coverage": 1.0}]},
        {"coverage": 0.5},
        # Mistakes are for the parser.
        {"schedule": "soon"},
        {"schedule": [3, None]},
        [],
        None,
    ],
)
def test_what_is_left_alone(block: Any) -> None:
    config = {KEY: block}
    assert not fill_total_steps(config, 7)
    assert config == {KEY: block}
    assert config[KEY] is block
    assert not fill_total_steps({}, 7)


@pytest.mark.parametrize("given", [{}, {"total_steps": "auto"}, {"total_steps": None}])
def test_fractions_get_their_steps_and_the_users_block_stays(given: dict[str, Any]) -> None:
    block = {"schedule": FRACTIONS} | given
    config = {KEY: block}
    assert fill_total_steps(config, 7)
    assert config == {KEY: {"schedule": FRACTIONS, "total_steps": 7}}
    assert block == {"schedule": FRACTIONS} | given
