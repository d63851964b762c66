"""How many steps a schedule's fractions are of, where the program that trains knows it and the block leaves it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.schedule import has_shares

_OPEN = (None, "auto")


def phases_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The phases of the schedule in a DeepSpeed config, as far as it is one; nothing is checked here."""
    block = config.get(KEY)
    if not isinstance(block, Mapping) or block.get("enabled") is False:
        return []
    schedule = block.get("schedule")
    return [phase for phase in schedule if isinstance(phase, Mapping)] if isinstance(schedule, list) else []


def never_begins(config: Mapping[str, Any], steps: int) -> str | None:
    """What to tell where the last phase would begin after the last of so many steps."""
    ends = [phase["until_step"] for phase in phases_of(config) if type(phase.get("until_step")) is int]
    if not ends or not 0 < steps <= max(ends):  # 0: the Trainer evaluates, and trains nothing
        return None
    return (
        f"{KEY}.schedule: the run ends with step {steps}, but the last phase would begin after step {max(ends)}, so "
        "nothing is trained in it"
    )


def fill_total_steps(config: dict[str, Any], steps: int) -> bool:
    """Write the number of steps of the whole run into the block if a phase ends at a fraction of them, and the block
    does not say how many they are. Returns whether that was so."""
    if not has_shares(phases_of(config)) or config[KEY].get("total_steps") not in _OPEN:
        return False
    config[KEY] = {**config[KEY], "total_steps": steps}  # a new one: the user's own stays as it is
    return True
