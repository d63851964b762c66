"""Text files that the package writes: for each of them who writes it, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoConfig

from sdp_deepspeed import folder_lock
from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.checkpoint.interop.describe import describe
from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from sdp_deepspeed.checkpoint.interop.load_universal import universal_tag
from sdp_deepspeed.checkpoint.interop.universal import LATEST_UNIVERSAL, ZERO
from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.storage.folder import find_checkpoint
from sdp_deepspeed.checkpoint.storage.names import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    LATEST,
    MANIFEST,
    MODEL_CONFIG,
    PLAN,
)
from sdp_deepspeed.data.background import problem_path, raise_problem, write_problem
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.demand import DemandOfOthers, waiting_for
from sdp_deepspeed.data.journal import JOURNAL, Journal
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.prepared import PreparedData, PreparedDataError
from sdp_deepspeed.data.stream_writer import Wanted
from sdp_deepspeed.data.tokenizer import identity, train_tokenizer
from sdp_deepspeed.folder_lock import LOCK, FolderInUseError
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.training.metrics_log import MetricsLog
from sdp_deepspeed.training.report_table import load_report
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.same_run import check_same_run
from tests.helpers.example_reports import report
from tests.helpers.other_jobs import left_by
from tests.helpers.trained_states import checkpointer_of, one_rank

TAGS = ("step_1", "step_10")  # the first one is what `latest` says when it is cut
RECORDS: tuple[dict[str, Any], ...] = ({"step": 1, "loss": 2.5}, {"step": 2, "kind": "\u00fc"}, {"step": 3})
SETTINGS = {"model": {"model_type": "llama"}, "seed": 1}


@dataclass(frozen=True, eq=False)
class WrittenFile:
    """One of them.

    Args:
        path: below the folder that `write` gets.
        writers: functions that write it, as `tests/unit/repository/test_writing.py` spells them.
        write: makes the file, and what its readers need beside it.
        read: each of them uses the folder; what they return can be compared.
        error: what a reader may raise; (): a cut must not stop it.
        older: results that are right, too, as an earlier file has them.
    """

    path: str
    writers: tuple[str, ...]
    write: Callable[[Path], object]
    read: tuple[Callable[[Path], object], ...]
    error: type[Exception] | tuple[()] = ValueError
    older: tuple[object, ...] = ()


def _run_folder(folder: Path) -> RunFolder:
    return RunFolder(folder, writes=True)


def _write_run(folder: Path) -> None:
    run = _run_folder(folder)
    run.write_json("config.json", SETTINGS)
    run.write_json("report.json", report("mine", scale=3))
    one_rank().plan.save(run.plan)
    for record in RECORDS:
        run.metrics.append(record)


def _resumed_metrics(folder: Path) -> list[dict[str, Any]]:
    log = MetricsLog(folder / "metrics.jsonl", writes=True)
    log.drop_after(RECORDS[-1]["step"])
    return log.read()


class _Config:
    """As much of a model's as a checkpoint takes."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "llama", "hidden_size": 64}


def _write_checkpoints(folder: Path) -> None:
    state: Any = one_rank()
    state.module.config = state.module.generation_config = _Config()
    for tag in TAGS:
        state.step()
        checkpointer_of(state).save(folder, tag, {"tag": tag})


def _loaded_tag(folder: Path) -> object:
    """Of the checkpoint that is loaded where none is asked for."""
    _, client_state = checkpointer_of(one_rank()).load(folder, None, LoadOptions())
    return client_state


def _load_newest(folder: Path) -> object:
    return checkpointer_of(one_rank()).load(folder, TAGS[-1], LoadOptions())[1]


def _found_tag(folder: Path) -> object:
    return find_checkpoint(folder).name


def _described(folder: Path) -> object:
    lines, is_complete = describe(folder / TAGS[-1])
    if not is_complete:
        raise ValueError(" ".join(lines))
    return lines[1:]


def _write_export(folder: Path) -> None:
    _write_checkpoints(folder / "checkpoints")
    export(folder / "checkpoints" / TAGS[-1], folder / "hf", ExportFormat(max_shard_bytes=1))


def _load_export(folder: Path) -> object:
    state = one_rank()
    checkpointer_of(state).load_pretrained(folder / "hf")
    return {name: value.tolist() for name, value in state.module.state_dict().items()}


def _hidden_size(folder: Path) -> object:
    return AutoConfig.from_pretrained(folder / "hf").hidden_size


def _write_universal(folder: Path) -> None:
    """As much of it as its `latest` needs."""
    name = f"{TAGS[-1]}_universal"
    (folder / name / ZERO).mkdir(parents=True)
    write_text(folder / LATEST_UNIVERSAL, name)


def _write_prepared(folder: Path) -> None:
    """With a tokenizer that somebody gave, since those have more files."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"document {number} \u00fc" for number in range(60)))
    tokenizer = train_tokenizer(text.read_text().split("\n\n"), 280)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / "given")
    config = DataConfig(
        source="files",
        path=str(text),
        text_documents="paragraph",
        tokenizer=str(folder / "given"),
        cache_dir=str(folder / "cache"),
    )
    prepare(config).rename(folder / "prepared")


def _prepared(folder: Path) -> object:
    prepared = PreparedData.load(folder / "prepared", wait_seconds=0)
    tokenizer = prepared.tokenizer()
    return prepared.identity, prepared.vocab_size, prepared.counts, identity(tokenizer), tokenizer.chat_template


def _parts(folder: Path) -> int:
    journal = Journal(folder / "prepared")
    journal.refresh()
    return len(journal)


def _write_problem(folder: Path) -> None:
    write_problem(problem_path(folder / "data-0", "job"), ValueError("no column"))


def _problem(folder: Path) -> str | None:
    try:
        raise_problem(problem_path(folder / "data-0", "job"))
    except ValueError as error:
        return str(error)
    return None


def _write_demand(folder: Path) -> None:
    with waiting_for(folder / "data-0") as say:
        say(Wanted(validation=1))
        (path,) = folder.iterdir()
        path.rename(folder / ".data-0.wanted.job")


def _demand(folder: Path) -> object:
    return DemandOfOthers(folder / "data-0")()


def _write_lock(folder: Path) -> None:
    left_by(folder)


def _is_refused_while_held(folder: Path) -> bool:
    """By a job that is still there, whatever the lock's file says of it."""
    with (
        (folder / LOCK).open("a") as other,
        mock.patch.object(folder_lock, "_SECONDS_BETWEEN_TRIES", 0),
    ):
        folder_lock.flock(other.fileno())
        with pytest.raises(FolderInUseError, match=str(folder)):
            folder_lock.hold(folder)
    return not folder_lock.is_held_by_others(folder)  # it has left now


_TO_RUN = "training/run_folder.py: RunFolder.write_json"
_TO_EXPORT = (
    "checkpoint/interop/export.py: _write_json",
    "engine/dense_export.py: DenseExport.save_pretrained.write",
    "fsdp/full_state.py: save_pretrained",
    "training/engines.py: _save_stock",
    "training/fsdp_engine.py: ShardedEngine.save_pretrained",
)
_IN_CHECKPOINT = (_loaded_tag, _load_newest, _described)


def _config_of_run(folder: Path) -> object:
    return check_same_run(_run_folder(folder), SETTINGS)


def _report_of_run(folder: Path) -> object:
    return _run_folder(folder).read_json("report.json")


def _plan_of_run(folder: Path) -> object:
    return Plan.load(folder / "plan.json")


def _universal(folder: Path) -> object:
    return universal_tag(folder, None)


def _document(name: str) -> WrittenFile:
    """For people, and vouched for by the manifest."""
    return WrittenFile(f"{TAGS[-1]}/{name}", ("checkpoint/save.py: _write_all",), _write_checkpoints, (_described,))


def _of_tokenizer(name: str) -> WrittenFile:
    path, writers = f"prepared/tokenizer/{name}", ("data/cache.py: _save", "data/prepare.py: _saved")
    return WrittenFile(path, writers, _write_prepared, (_prepared,), PreparedDataError)


WRITTEN_FILES: tuple[WrittenFile, ...] = (
    WrittenFile("config.json", (_TO_RUN,), _write_run, (_config_of_run,)),
    WrittenFile("report.json", (_TO_RUN,), _write_run, (_report_of_run, load_report)),
    WrittenFile("plan.json", ("plan/plan.py: Plan.save",), _write_run, (_plan_of_run,)),
    WrittenFile(
        "metrics.jsonl",
        ("training/metrics_log.py: MetricsLog.append", "training/metrics_log.py: MetricsLog.drop_after"),
        _write_run,
        (_resumed_metrics,),
        error=(),
        older=tuple(list(RECORDS[:number]) for number in range(len(RECORDS))),
    ),
    WrittenFile(
        f"{TAGS[-1]}/{MANIFEST}",
        ("checkpoint/storage/manifest.py: write_manifest", "checkpoint/storage/folder.py: publish"),
        _write_checkpoints,
        _IN_CHECKPOINT,
    ),
    WrittenFile(
        f"{TAGS[-1]}/{INDEX}",
        ("checkpoint/storage/chunk_files.py: SafetensorsWriter.finish",),
        _write_checkpoints,
        _IN_CHECKPOINT,
    ),
    *(_document(name) for name in (PLAN, CONFIG, MODEL_CONFIG, GENERATION_CONFIG)),
    WrittenFile(LATEST, ("checkpoint/storage/folder.py: publish",), _write_checkpoints, (_loaded_tag, _found_tag)),
    WrittenFile(LATEST_UNIVERSAL, ("checkpoint/interop/from_zero.py: convert",), _write_universal, (_universal,)),
    WrittenFile("hf/config.json", _TO_EXPORT, _write_export, (_hidden_size,), OSError),
    WrittenFile("hf/model.safetensors.index.json", _TO_EXPORT, _write_export, (_load_export,)),
    WrittenFile(
        "prepared/meta.json", ("data/prepared.py: PreparedData.save",), _write_prepared, (_prepared,), PreparedDataError
    ),
    WrittenFile(
        f"prepared/{JOURNAL}", ("data/journal.py: Journal.append",), _write_prepared, (_parts,), older=(0,), error=()
    ),
    WrittenFile(
        ".data-0.job.problem", ("data/background.py: write_problem",), _write_problem, (_problem,), PreparedDataError
    ),
    WrittenFile(".data-0.wanted.job", ("data/demand.py: waiting_for.say",), _write_demand, (_demand,), error=()),
    *(_of_tokenizer(name) for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
    WrittenFile(LOCK, ("folder_lock.py: _take",), _write_lock, (_is_refused_while_held,), error=()),
)
