"""A file that runs code when it is unpickled carelessly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Malicious:
    """Makes a folder `ran` when it is unpickled by one who runs whatever a file says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path / "ran"),)
