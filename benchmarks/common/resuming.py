"""Files that a run goes on with: what they have already, if they are of the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common.ranks import gather

_OF_THIS_CALL = ("output", "local_rank")  # a call with others of these goes on with the same figures


def lasting(arguments: argparse.Namespace, *, besides: Collection[str]) -> dict[str, Any]:
    """Arguments that all calls must have in common which write into one file.

    Args:
        besides: those of this call alone, such as who is measured in it.
    """
    return {name: value for name, value in vars(arguments).items() if name not in (*_OF_THIS_CALL, *besides)}


def found_before(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the file has, on all ranks, which all call it; empty if there is none.

    Args:
        facts: of this run, which are in the file as they stand here.

    Raises:
        ValueError: they are of another run; on all ranks.
    """
    found: dict[str, Any] = {}
    if dist.get_rank() == 0 and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    found = gather(found)[0]
    own = json.loads(json.dumps(facts))
    others = [word for name in own if found for word in _differing(name, found.get(name), own[name])]
    if others:
        raise ValueError(f"{path} is of a run with another {', '.join(others)}: name another file, or remove this one")
    return found


def _differing(name: str, theirs: Any, ours: Any) -> list[str]:
    """Name of a fact that differs; of arguments each."""
    if name != "arguments" or not isinstance(theirs, dict):
        return [name] if theirs != ours else []
    return [f"--{key.replace('_', '-')}" for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
