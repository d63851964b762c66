"""Where and for how long cells run; a cell that time ends keeps what it needs to go on from there, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Resources:
    """
    Args:
        device: of the model and its data, as torch names it.
        end: no cell begins later, and no step but a first one if there is a folder; a time of UTC, None for any.
        folder: of cells that are not over; None finishes each that has begun.
    """

    device: str = "cpu"
    end: datetime | None = None
    folder: Path | None = None

    @property
    def is_time_over(self) -> bool:
        return self.end is not None and datetime.now(tz=UTC) >= self.end

    @property
    def ends_cells(self) -> bool:
        """Whether a cell is to stop before its next step."""
        return self.folder is not None and self.is_time_over

    @property
    def name(self) -> str:
        """Of the device, as figures name it."""
        return torch.cuda.get_device_name(self.device) if torch.device(self.device).type == "cuda" else "CPU"

    def pause_of(self, facts: Mapping[str, Any]) -> Pause:
        """Of the cell that these facts are of; one of other facts begins anew."""
        if self.folder is None:
            return Pause(None, self.device)
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return Pause(self.folder / f"{digest}.pt", self.device)


@dataclass(frozen=True)
class Pause:
    """What one cell keeps.

    Args:
        path: of its file; None keeps nothing.
        device: where its tensors belong.
    """

    path: Path | None
    device: str

    def load(self) -> dict[str, Any] | None:
        """What was saved; None for a cell that has not begun. Random numbers go on as they would have."""
        if self.path is None or not self.path.exists():
            return None
        saved: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        torch.set_rng_state(saved["random"])
        if saved["random_on_gpu"] is not None:
            torch.cuda.set_rng_state(saved["random_on_gpu"], self.device)
        return saved

    def save(self, state: Mapping[str, Any]) -> None:
        """The file is whole at any moment."""
        assert self.path is not None
        on_gpu = torch.cuda.get_rng_state(self.device) if torch.device(self.device).type == "cuda" else None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_suffix(".writing")
        torch.save({**state, "random": torch.get_rng_state(), "random_on_gpu": on_gpu}, staging)
        os.replace(staging, self.path)

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
