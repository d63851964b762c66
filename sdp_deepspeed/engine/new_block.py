"""The block that a re-plan gives an engine: what it may change, and how it is told from the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.messages import quoted

# What an engine reads once, when it is built.
_FIXED = ("enabled", "allow_optimizer", "silence_limit", "checkpoint")
_EITHER = ("coverage", "holders")  # one says what the other would


def new_block(block: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the block after a re-plan.

    Args:
        block: those that change; others stay, but that `coverage` takes the place of `holders`, and it theirs.
        before: as the config has it.

    Raises:
        ValueError: it is no mapping.
    """
    if not isinstance(block, Mapping):
        raise ValueError(
            f'engine.replan: got {block!r}, expected a mapping of keys of {KEY}, such as {{"coverage": 1}}'
        )
    dropped = _EITHER if any(block.get(name) is not None for name in _EITHER) else ()
    return {name: value for name, value in before.items() if name not in dropped} | dict(block)


def parsed(block: Mapping[str, Any], before: SubnetworkConfig) -> SubnetworkConfig:
    """The block, checked.

    Raises:
        ValueError: as `parse`, or it changes what an engine cannot change.
    """
    result = parse({KEY: block})
    fixed = [name for name in _FIXED if result is None or getattr(result, name) != getattr(before, name)]
    if fixed or result is None:
        raise ValueError(
            f"engine.replan: {quoted([f'{KEY}.{name}' for name in fixed])} cannot change in a run; save a checkpoint "
            "and load it in an engine that is built with it"
        )
    return result
