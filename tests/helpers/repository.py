"""Where the repository's folders are, and in which order the package's rooms stand."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sdp_deepspeed"
TESTS = ROOT / "tests"

# From the roof to the floor: a room (or a module beside the rooms) imports only what stands below it.
FLOORS = (
    "__main__",
    "report",  # the old name of a command
    "arming",
    "hosts",
    "vision",
    "training",
    "__init__",
    "batch_norm",
    "fsdp",
    "engine",
    "replan",
    "deferred_init",
    "checkpoint",
    "masking",
    "optimizer",
    "estimate",
    "exchange",
    "reference",
    "tensor_parallel",
    "layout",
    "plan",
    "data",
    "architectures",
    "support",
    "distributed",
    "measure",
    "total_steps",
    "config",
    "schedule",
    "config_errors",
    "coverage",
    "units",
    "command_parser",
    "atomic_files",
    "folder_lock",
    "lock_owner",
    "sizes",
    "gpus",
    "messages",
    "version",
)
