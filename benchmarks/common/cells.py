"""Cells of a study: those that are asked for, and those that are done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from sdp_deepspeed.atomic_files import write_text

TUNING_SEED = 99  # only for choosing learning rates; excluded from figures


def named(patterns: Sequence[str], subjects: Iterable[str]) -> list[str]:
    """Subjects, in the order of the expressions that match their whole names.

    Raises:
        ValueError: an expression matches none.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in subjects if re.fullmatch(pattern, name)]
        if not matching:
            raise ValueError(f"--only: no subject is named {pattern!r}; there are {', '.join(subjects)}")
        found |= dict.fromkeys(matching)
    return list(found)


class Store:
    """Cells that are done, each written when it is: a JSON file for each in a folder, or one file of all.

    Args:
        path: of the folder, or of the file, which ends in .json.
        what: the kind of figures.

    Raises:
        ValueError: figures are of another kind.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        self._provenance = provenance()  # of the code that runs; commits may follow
        self.cells: list[dict[str, Any]] = []
        for file in [path] if path.is_file() else sorted(path.glob("*.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.get("what") != what:
                raise ValueError(f"--output: {file} has figures of {content.get('what')!r}; choose another one")
            self.cells += content["cells"] if file == path else [content]

    def having(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Cells with all of these facts."""
        wanted = json.loads(json.dumps(facts))
        return [cell for cell in self.cells if all(cell.get(key) == value for key, value in wanted.items())]

    def add(self, names: Mapping[str, Any], figures: Mapping[str, Any], file: str = "") -> None:
        """Add a cell, or replace the one with the same names.

        Args:
            names: what tells it from all others.
            file: name of its file, in a folder.
        """
        added = json.loads(json.dumps({**figures, "provenance": self._provenance}))  # as it is when it is read
        others = [cell for cell in self.cells if any(cell[key] != value for key, value in names.items())]
        self.cells = sorted([*others, added], key=lambda cell: tuple(cell[key] for key in names))
        everything = {"what": self.what, "cells": self.cells, "provenance": self._provenance}
        target = self.path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps({"what": self.what, **added} if file else everything, indent=1) + "\n")
