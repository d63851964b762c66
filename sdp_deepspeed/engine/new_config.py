"""What a re-plan makes of an engine's config: the block and the stage that change, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.messages import quoted

# What an engine reads once, when it is built.
_FIXED = ("enabled", "allow_optimizer", "silence_limit", "checkpoint")
_EITHER = ("coverage", "holders")  # one says what the other would
_STAGES = (0, 1, 2)
_ZERO = "zero_optimization"


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
    dropped = _EITHER if any(block.get(name) is not None for name in _EITHER) else ()
    kept = {name: value for name, value in config[KEY].items() if name not in dropped}
    result = {**config, KEY: kept | dict(block)}
    if stage is not None:
        zero = config.get(_ZERO)
        result[_ZERO] = {**(zero if isinstance(zero, Mapping) else {}), "stage": stage}
    return result


def new_block(config: Mapping[str, Any], before: SubnetworkConfig) -> SubnetworkConfig:
    """The block of `new_config`, parsed.

    Raises:
        ValueError: as `parse`, or it changes what cannot change.
    """
    result = parse(config)
    others = [] if result is None else [name for name in _FIXED if getattr(result, name) != getattr(before, name)]
    fixed = ["enabled"] if result is None else others
    if result is None or fixed:
        raise ValueError(
            f"engine.replan: {quoted([f'{KEY}.{name}' for name in fixed])} cannot change in a run; save a checkpoint "
            "and load it in an engine that is built with it"
        )
    return result
