"""The block `subnetwork_data_parallel` (block.py), its schedule, errors that say what is wrong in it, and recipes."""

from sdp_deepspeed.config.block import (
    KEY,
    MODES,
    REFUSED_COMBINATIONS,
    CheckpointOptions,
    LocalSteps,
    Mode,
    SubnetworkConfig,
    parse,
    parse_block,
)

__all__ = [
    "KEY",
    "MODES",
    "REFUSED_COMBINATIONS",
    "CheckpointOptions",
    "LocalSteps",
    "Mode",
    "SubnetworkConfig",
    "parse",
    "parse_block",
]
