"""Keys that a re-plan changes, those that stay, and those that cannot change."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.engine.new_config import new_block, new_config
from tests.helpers.models import config

BEFORE = config(holders=2, strategy="neuron", seed=3)


def changed(block: Any, stage: Any = None, before: dict[str, Any] = BEFORE) -> dict[str, Any]:
    return new_config(before, block, stage)


def test_what_is_not_said_stays() -> None:
    assert changed({"seed": 4})[KEY] == {"holders": 2, "strategy": "neuron", "seed": 4}
    assert changed({"coverage": 0.5})[KEY] == {"coverage": 0.5, "strategy": "neuron", "seed": 3}
    assert changed({"holders": 1}, before=config(coverage=0.5))[KEY] == {"holders": 1}
    assert changed({}) == BEFORE


def test_the_user_s_config_stays_as_it_is() -> None:
    before = config(holders=2)
    after = changed({"holders": 1}, 2, before)
    assert before == config(holders=2)
    assert (after[KEY]["holders"], after["zero_optimization"]) == (1, {"stage": 2})
    assert changed({}, 0, before | {"zero_optimization": True})["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize("stage", [3, -1, "1", True, 1.5])
def test_no_stage(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"engine\.replan\(stage=\.\.\.\): got .*stages 0, 1 and 2"):
        changed({}, stage)


@pytest.mark.parametrize("block", [None, 0.5, [("coverage", 1.0)]])
def test_no_block(block: Any) -> None:
    with pytest.raises(ValueError, match=r'expected keys of subnetwork_data_parallel.*\{"coverage": 1\}'):
        changed(block)


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"checkpoint": {"keep_last": 2}}, "checkpoint"),
        ({"silence_limit": 100.0}, "silence_limit"),
        ({"allow_optimizer": True}, "allow_optimizer"),
        ({"enabled": False}, "enabled"),
    ],
)
def test_what_an_engine_reads_once(block: dict[str, Any], name: str) -> None:
    before = parse(BEFORE)
    assert before is not None
    with pytest.raises(ValueError, match=rf"{KEY}\.{name}'? cannot change in a run.*save a checkpoint"):
        new_block(changed(block), before)
    assert new_block(changed({"evaluation": "stream"}), before).evaluation == "stream"
    with pytest.raises(ValueError, match="colour"):
        new_block(changed({"colour": 1}), before)
