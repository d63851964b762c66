"""The folder of one run: config.json, plan.json, metrics.jsonl, report.json, checkpoints/, hf/."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

# What must be the same when a run is resumed; the rest (steps, intervals) may change.
_FIXED = ("model", "deepspeed_config", "data", "seed", "num_ranks")


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: null stands for them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _differences(old: Any, new: Any, path: str) -> list[str]:
    """JSON paths at which two configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{path}.{key}")]
    return [] if old == new else [f"{path}: {old!r} then, {new!r} now"]


class RunFolder:
    """Files of a run. Every rank may read; only the rank with `writes` changes anything, others' calls do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"
        self.plan = path / "plan.json"
        self._lock: TextIO | None = None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None when there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error.msg}): remove it, or choose another --run-folder") from None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        if self.writes:
            _write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def check_same_run(self, config: Mapping[str, Any]) -> None:
        """Refuse to go on with another model, data, seed, layout or DeepSpeed config than the run began with."""
        old = self.read_json("config.json")
        if old is None:
            return
        rows = [line for key in _FIXED for line in _differences(old.get(key), config.get(key), key)]
        if rows:
            more = f"; +{len(rows) - 5} more" if len(rows) > 5 else ""
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(rows[:5])}{more}): "
                "choose another --run-folder, remove this one, or go back to its settings"
            )

    def create(self) -> None:
        """Make the folder and keep others out of it until this process ends.

        Raises:
            ValueError: another run is still in it, such as one that Ctrl-C interrupted and that is saving now.
        """
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is in use: wait until its run has ended (it may still be saving)") from None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        if self.writes:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(_without_nan(record)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a last line that a crash cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def drop_metrics_after(self, step: int) -> None:
        """Forget what lies after the checkpoint that is resumed: those steps will be made again."""
        if self.writes and (records := self.metrics()):
            kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
            _write_atomically(self.path / "metrics.jsonl", "".join(kept))

    @property
    def has_checkpoint(self) -> bool:
        return (self.checkpoints / "latest").exists()

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, after a new one is complete."""
        if self.writes:
            for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
                shutil.rmtree(old)
