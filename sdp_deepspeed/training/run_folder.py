"""The folder of one run: config.json, plan.json, metrics.jsonl, report.json, checkpoints/, hf/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.checkpoint.storage.folder import prune
from sdp_deepspeed.folder_lock import hold
from sdp_deepspeed.training.metrics_log import MetricsLog
from sdp_deepspeed.training.user_errors import writing


class RunFolder:
    """Files of a run. Every rank may read; only the rank with `writes` changes anything, others' calls do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"
        self.plan = path / "plan.json"
        self.metrics = MetricsLog(path / "metrics.jsonl", writes=writes)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None when there is none."""
        path = self.path / name
        try:
            content = json.loads(regular(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ValueError(
                f"--run-folder: cannot read {path}: {error.strerror}; permit it, or choose another folder"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): remove it, or choose another --run-folder") from None
        if not isinstance(content, dict):
            raise ValueError(
                f"{path} holds a {type(content).__name__}, not a JSON object: remove it, or choose another --run-folder"
            )
        return content

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run; RunFolderError if that is not possible."""
        if self.writes:
            path = self.path / name
            with writing(path):
                write_text(path, json.dumps(content, indent=2) + "\n")

    def create(self) -> None:
        """Make the folder and keep other jobs out of it until this process ends.

        Raises:
            ValueError: it cannot be made, or another run is still in it, such as one that Ctrl-C interrupted and that
                is saving now; names it.
        """
        if not self.writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            hold(self.path)
        except OSError as error:
            reason = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror
            raise ValueError(
                f"--run-folder: cannot make {self.path}: {reason}; choose another folder, or make this one possible"
            ) from None

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step_*"))

    def prune_checkpoints(self, keep: int) -> None:
        """After a new checkpoint is complete: remove all but the newest `keep`, and never what `latest` names: steps
        after it can be there where a run was killed right before it was written, or resumed from an older one."""
        if self.writes:
            tags = sorted(path.name for path in self.checkpoints.glob("step_*"))
            with writing(self.checkpoints):
                prune(self.checkpoints, tags, keep=keep)
