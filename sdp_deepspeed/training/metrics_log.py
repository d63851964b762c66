"""metrics.jsonl: one line of JSON for each step, evaluation, measurement and phase of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.training.user_errors import RunFolderError, writing

Record = Mapping[str, Any]


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


class MetricsLog:
    """Every rank may read; only the rank with `writes` changes anything, others' calls do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes
        self._problem: RunFolderError | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line.

        Rank 0 alone would see an error here, and the others would hang: it makes this log `failed`, and ranks that
        have agreed on it call `raise_problem`.
        """
        if not self._writes or self._problem is not None:  # behind a line that was cut short others would be lost, too
            return
        try:
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_without_nan(record)) + "\n")
        except RunFolderError as error:
            self._problem = error

    @property
    def failed(self) -> bool:
        """Whether a line was lost."""
        return self._problem is not None

    def raise_problem(self) -> None:
        """Raise RunFolderError if a line was lost."""
        if self._problem is not None:
            raise self._problem

    def read(self) -> list[dict[str, Any]]:
        """All lines; a last one that a crash cut short is left out.

        Raises:
            ValueError: another line is none that `append` writes; names it.
        """
        if not self._path.exists():
            return []
        lines = regular(self._path).read_bytes().splitlines()
        records = [_record(line) for line in lines]
        if records and records[-1] is None:
            records.pop()
        if None in records:
            raise ValueError(
                f"{self._path}:{records.index(None) + 1} is no record of a run: remove this line, or choose another "
                "--run-folder"
            )
        return [record for record in records if record is not None]

    def drop_after(self, step: int) -> None:
        """Forget what lies after the checkpoint that is resumed: those steps will be made again. What was cut goes."""
        if self._writes and self._path.exists():
            kept = [json.dumps(record) + "\n" for record in self.read() if record["step"] <= step]
            with writing(self._path):
                write_text(self._path, "".join(kept))


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is cut short, or no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: null stands for them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
