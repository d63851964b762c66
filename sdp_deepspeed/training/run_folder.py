"""The folder of one run: config.json, plan.json, metrics.jsonl, report.json, checkpoints/, hf/."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.checkpoint.storage.folder import prune
from sdp_deepspeed.messages import listed

# What must be the same when a run is resumed; the rest (intervals, and steps where no schedule ends with them) may
# change. So may the layout where both runs have the block: its checkpoints are of the dense model.
_FIXED = ("model", "deepspeed_config", "data", "seed", "num_ranks")
_BLOCK = "subnetwork_data_parallel"
_LAYOUT = (
    "num_ranks",
    *(
        f"deepspeed_config.{key}"
        for key in (
            _BLOCK,
            "zero_optimization",
            "tensor_parallel",
            "bf16",
            "data_types",
            "communication_data_type",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    ),
)
# Where `fill_automatic` writes --steps for "auto".
_SCHEDULE_LENGTH = "deepspeed_config.scheduler.params.total_num_steps"


class RunFolderError(RuntimeError):
    """A file of the run cannot be written, as on a full disk; the message names it, the reason and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """RunFolderError instead of the block's OSError."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; make it possible (space, permissions) and start the same "
            "command again: it resumes at the last checkpoint"
        ) from None


def _write_atomically(path: Path, text: str) -> None:
    with writing(path):
        write_text(path, text)


def _without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: null stands for them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _differences(old: Any, new: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """JSON paths at which two configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return {p: v for key in keys for p, v in _differences(old.get(key), new.get(key), f"{path}.{key}").items()}
    return {} if old == new else {path: (old, new)}


class RunFolder:
    """Files of a run. Every rank may read; only the rank with `writes` changes anything, others' calls do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"
        self.plan = path / "plan.json"
        self._lock: TextIO | None = None
        self._problem: RunFolderError | None = None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None when there is none."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ValueError(
                f"--run-folder: cannot read {path}: {error.strerror}; permit it, or choose another folder"
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error.msg}): remove it, or choose another --run-folder") from None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        if self.writes:
            _write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def check_same_run(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Refuse to go on with another model, data, seed or DeepSpeed config than the run began with.

        Returns:
            JSON paths at which the layout differs, with what was and what is.
        """
        old = self.read_json("config.json")
        if old is None:
            return {}
        found = {p: v for key in _FIXED for p, v in _differences(old.get(key), config.get(key), key).items()}
        is_ours = all(_BLOCK in (run.get("deepspeed_config") or {}) for run in (old, config))
        layout = {p: v for p, v in found.items() if is_ours and p.startswith(_LAYOUT)}
        found = {p: v for p, v in found.items() if p not in layout}
        if list(found) == [_SCHEDULE_LENGTH] and found[_SCHEDULE_LENGTH] == (old.get("steps"), config.get("steps")):
            self._refuse_other_steps(*found[_SCHEDULE_LENGTH])
        rows = [f"{path}: {then!r} then, {now!r} now" for path, (then, now) in found.items()]
        if rows:
            raise ValueError(
                f"{self.path} holds a run with other settings ({listed(rows, separator='; ')}): "
                "choose another --run-folder, remove this one, or go back to its settings"
            )
        return layout

    def _refuse_other_steps(self, then: int, now: int) -> None:
        raise ValueError(
            f"--steps was {then} when {self.path} was begun and is {now} now; the learning rate's schedule ends with "
            f'it ("total_num_steps": "auto"), so the steps already made would have had other learning rates. Give '
            f'--steps {then}, write "total_num_steps": {then} in the DeepSpeed JSON to keep that schedule and go on '
            "after its end, or choose another --run-folder"
        )

    def create(self) -> None:
        """Make the folder and keep others out of it until this process ends.

        Raises:
            ValueError: it cannot be made, or another run is still in it, such as one that Ctrl-C interrupted and that
                is saving now.
        """
        if not self.writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is in use: wait until its run has ended (it may still be saving)") from None
        except OSError as error:
            reason = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror
            raise ValueError(
                f"--run-folder: cannot make {self.path}: {reason}; choose another folder, or make this one possible"
            ) from None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl.

        Rank 0 alone would see an error here, and the others would hang: it becomes this folder's `failed`, and ranks
        that have agreed on it call `raise_problem`.
        """
        if not self.writes:
            return
        path = self.path / "metrics.jsonl"
        try:
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_without_nan(record)) + "\n")
        except RunFolderError as error:
            self._problem = self._problem or error

    @property
    def failed(self) -> bool:
        """Whether a line of metrics.jsonl was lost."""
        return self._problem is not None

    def raise_problem(self) -> None:
        """Raise RunFolderError if a line of metrics.jsonl was lost."""
        if self._problem is not None:
            raise self._problem

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
        return any(self.checkpoints.glob("step_*"))

    def prune_checkpoints(self, keep: int) -> None:
        """After a new checkpoint is complete: remove all but the newest `keep`, and never what `latest` names: steps
        after it can be there where a run was killed right before it was written, or resumed from an older one."""
        if self.writes:
            tags = sorted(path.name for path in self.checkpoints.glob("step_*"))
            with writing(self.checkpoints):
                prune(self.checkpoints, tags, keep=keep)
