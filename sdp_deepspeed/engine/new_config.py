"""What a re-plan makes of an engine's config: the block and the stage that change, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.schedule import FIXED, OF_SCHEDULE, merged, with_stage

_STAGES = (0, 1, 2)


def new_config(config: Mapping[str, Any], block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
    """DeepSpeed's config after a re-plan.

    Args:
        config: before.
        block: keys of the block that change; others stay, but that `coverage` takes the place of `holders`, and it
            theirs.
        stage: None leaves it.

    Raises:
        ValueError: it is no mapping, or no stage.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'engine.replan: got {block!r}, expected keys of {KEY} that change, such as {{"coverage": 1}}')
    if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
        raise ValueError(f"engine.replan(stage=...): got {stage!r}, expected one of ZeRO's stages 0, 1 and 2, or None")
    _refuse_fixed([name for name in OF_SCHEDULE if name in block])
    return with_stage({**config, KEY: merged(config[KEY], block)}, stage)


def new_block(config: Mapping[str, Any], before: SubnetworkConfig) -> SubnetworkConfig:
    """The block of `new_config`, parsed.

    Raises:
        ValueError: as `parse`, or it changes what cannot change.
    """
    result = parse(config)
    if result is None:
        raise _fixed(["enabled"])
    _refuse_fixed([name for name in FIXED if getattr(result, name) != getattr(before, name)])
    return result


def _refuse_fixed(names: Sequence[str]) -> None:
    if names:
        raise _fixed(names)


def _fixed(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"engine.replan: {quoted([f'{KEY}.{name}' for name in names])} cannot change in a run; save a checkpoint and "
        "load it in an engine that is built with it"
    )
