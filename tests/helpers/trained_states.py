"""What is in a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from sdp_deepspeed.folder_lock import LOCK


def names_in(folder: Path) -> list[str]:
    """All but the lock, which is there while the process is."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)
