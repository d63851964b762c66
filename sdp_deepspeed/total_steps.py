"""Fill in `total_steps` of a schedule from the host, if the block does not set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.schedule import has_shares

_OPEN = (None, "auto")


def phases_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The phases of the schedule in a DeepSpeed config that has not been validated."""
    block = config.get(KEY)
    if not isinstance(block, Mapping) or block.get("enabled") is False:
        return []
    schedule = block.get("schedule")
    return [phase for phase in schedule if isinstance(phase, Mapping)] if isinstance(schedule, list) else []


def never_begins(config: Mapping[str, Any], steps: int) -> str | None:
    """A warning if the last phase would begin after the end of the run."""
    ends = [phase["until_step"] for phase in phases_of(config) if type(phase.get("until_step")) is int]
    if not ends or not 0 < steps <= max(ends):  # 0: the Trainer only evaluates
        return None
    return (
        f"{KEY}.schedule: the run ends with step {steps}, but the last phase would begin after step {max(ends)}; it is "
        "not reached"
    )


def fill_total_steps(config: dict[str, Any], steps: int) -> bool:
    """Set `total_steps` if a phase ends at a fraction of it and the block lacks it. Returns whether it was set."""
    if not has_shares(phases_of(config)) or config[KEY].get("total_steps") not in _OPEN:
        return False
    config[KEY] = {**config[KEY], "total_steps": steps}  # a copy: do not change the user's
    return True
