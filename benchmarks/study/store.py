"""All cells of a study in one JSON file, which is complete after each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.study.cell import Cell
from sdp_deepspeed.atomic_files import write_text

_KEYS = ("study", "subject", "seed", "budget", "rate")


class Store:
    """One process at a time writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cells: list[dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
        )

    def has(self, cell: Cell, described: Mapping[str, Any]) -> bool:
        """Whether that cell is done, for the subject as it is described now."""
        return any(self._is(found, cell) and found["described"] == described for found in self.cells)

    def add(self, result: Mapping[str, Any]) -> None:
        """In place of one of the same names; the file is whole at any moment."""
        cell = Cell(**{key: result[key] for key in _KEYS})
        facts = provenance()
        kept = [found for found in self.cells if not self._is(found, cell)]
        self.cells = sorted([*kept, {**result, "commit": facts["commit"]}], key=_order)
        text = json.dumps({"what": "learning_study", "cells": self.cells, "provenance": facts}, indent=1) + "\n"
        write_text(self._path, text, permissions=0o644)

    @staticmethod
    def _is(found: Mapping[str, Any], cell: Cell) -> bool:
        return all(found[key] == getattr(cell, key) for key in _KEYS)


def _order(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(found[key] for key in _KEYS)
