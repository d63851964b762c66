"""All cells of a study in one JSON file, which is complete after each of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.command_parser import read_json

_KIND = "learning_study"
_KEYS = ("study", "subject", "seed", "budget", "rate")


class Store:
    """
    Raises:
        ValueError: what is at the path is not such a file.
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._provenance = provenance()  # of the code that runs, whatever is committed meanwhile
        self.cells: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._read()
            if not path.exists():
                self._write()

    def has(self, identity: Mapping[str, Any]) -> bool:
        """Whether that cell is done, with all that decides its figures as it is now."""
        return any(all(found.get(key) == value for key, value in identity.items()) for found in self.cells)

    def add(self, result: Mapping[str, Any]) -> None:
        """In place of one of the same names; what others have written since, or are writing, stays."""
        with self._alone():
            self._read()
            self.cells = [found for found in self.cells if any(found[key] != result[key] for key in _KEYS)]
            self.cells.append({**result, "provenance": self._provenance})
            self.cells.sort(key=lambda found: tuple(found[key] for key in _KEYS))
            self._write()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """With the folder locked: the file itself is replaced by each writer."""
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _read(self) -> None:
        if not self._path.exists():
            return
        content = read_json(self._path, "--output")
        if content.get("what") != _KIND:
            raise ValueError(f"--output: {self._path} is not of this study, but of {content.get('what')!r}")
        if not isinstance(content.get("cells"), list):
            raise ValueError(f"--output: {self._path} has no list of cells")
        self.cells = content["cells"]

    def _write(self) -> None:
        text = json.dumps({"what": _KIND, "cells": self.cells, "provenance": self._provenance}, indent=1) + "\n"
        write_text(self._path, text)
