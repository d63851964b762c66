"""The cache: what decides its content, who may make it, and what a failure leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sdp_deepspeed.atomic_files import complete_or_absent
from sdp_deepspeed.data import DataConfig, stream_writer
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.cache import open_caches
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.prepare import num_workers, prepare
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.progress import LogProgress
from sdp_deepspeed.data.row_groups import RowGroups
from sdp_deepspeed.data.tokenize_part import TokenizedPart, is_held_out
from sdp_deepspeed.data.worker import WorkerSetup
from sdp_deepspeed.data.workers import Workers
from sdp_deepspeed.lock_owner import machine
from tests.helpers.documents import NUM_DOCUMENTS, numbers, text
from tests.helpers.fineweb import plain_ids, split, write_shard
from tests.helpers.repository import ROOT


def test_tokenizer_learns_nothing_from_held_out_documents(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, learned = tokenizers.train_tokenizer, set[int]()

    def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
        texts = list(documents)
        learned.update(*map(numbers, texts))
        return real(texts, vocab_size)

    monkeypatch.setattr(tokenizers, "train_tokenizer", train_tokenizer)
    prepare(config())
    assert learned == {number for number in range(NUM_DOCUMENTS) if not is_held_out(text(number), 0.1)}


def test_cache_is_used_and_keyed_by_what_matters(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(config())
    for changes in ({"vocab_size": 300}, {"max_bytes": 5000}, {"validation_fraction": 0.2}):
        assert prepare(config(**changes)) != folder
    monkeypatch.setattr(tokenizers, "train_tokenizer", None)
    for changes in ({}, {"sequence_length": 64}, {"seed": 3}, {"validation_blocks": 2}):
        assert prepare(config(**changes)) == folder


def test_many_at_once_make_one_cache(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: prepare(config()), range(4)))
    assert len(folders) == 1
    (tokenizer,) = (tmp_path / "cache").glob("tokenizer-*")
    (folder,) = folders
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {tokenizer.name, folder.name}
    assert {path.name for path in folder.iterdir()} == {
        *("train.bin", "validation.bin", "parts.jsonl", "meta.json", "tokenizer")
    }, "and no lock"


def test_failure_leaves_nothing_behind(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document with text within max_bytes 3"):
        prepare(config(max_bytes=3))
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_killed_preparations_left_is_removed(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    """Of other texts, too, and where nothing has to be prepared; what is being prepared stays."""
    for _ in range(2):
        left = tmp_path / "cache" / f".data-0.{machine()}.0.writing"
        left.mkdir(parents=True)
        (left / "train.bin").write_bytes(b"torn")
        with complete_or_absent(tmp_path / "cache" / "data-1", concurrent=True) as alive:
            prepare(config())
            assert alive.exists()
        assert not left.exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_cache_disk_is_named(
    config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sdp_deepspeed.data.stream_writer.StreamWriter.write", mock.Mock(side_effect=error))
        with pytest.raises(OSError, match=f"No space left on device.*: '{tmp_path / 'cache'}'"):
            prepare(config())
    assert list((tmp_path / "cache").glob("data-*")) == []
    prepare(config())


def test_a_single_document_cannot_be_split(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("words and words\n\n" * 100)
    with pytest.raises(ValueError, match=r'both need text.*text_documents "paragraph"'):
        prepare(config(path=str(tmp_path / "one.txt")))


def test_cache_dir_that_cannot_be_made(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir .* cannot be made"):
        prepare(config(cache_dir=str(tmp_path / "file" / "cache")))


@pytest.mark.parametrize(("changes", "expected"), [({"workers": 2}, [2]), ({}, [])])
def test_workers_are_as_many_as_asked_for(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: list[int]
) -> None:
    """Little text is worth none. The tokens are the same."""
    started: list[int] = []

    class Counted(Workers):
        def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
            started.append(num_workers)
            super().__init__(setup, num_workers)

    monkeypatch.setattr("sdp_deepspeed.data.prepare.Workers", Counted)
    folder = prepare(config(**changes))
    assert started == expected
    tokens = PreparedData.load(folder).blocks("train", 1)[:, 0].tolist()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokens == plain_ids(tokenizer, split(map(text, range(NUM_DOCUMENTS)), 0.1)["train"])


def test_by_default_training_keeps_most_cores(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp_deepspeed.data.prepare.num_cores", lambda: 16)
    assert num_workers(config()) == 16
    assert num_workers(config(tokenize="during", validation_blocks=1)) == 4
    assert num_workers(config(workers=3)) == 3
    monkeypatch.setattr("sdp_deepspeed.data.prepare.num_cores", lambda: 2)
    assert num_workers(config(tokenize="during", validation_blocks=1)) == 1


def test_ids_above_65536_are_kept(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)} | {"[EOS]": 70_000}
    backend = Tokenizer(WordLevel(words, unk_token="[EOS]"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(tmp_path / "large")
    texts = [f"w{number} w{69_999 - number}" for number in range(200)]
    shard = write_shard(tmp_path / "large.parquet", texts)
    folder = prepare(config(path=str(shard), tokenizer=str(tmp_path / "large"), vocab_size=None))
    tokens = PreparedData.load(folder).blocks("train", 3).tolist()
    assert tokens == [[int(a[1:]), int(b[1:]), 70_000] for a, b in map(str.split, split(texts, 0.1)["train"])]


class Noted(LogProgress):
    """Parts that were tokenized."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    def part(self, part: Part, result: TokenizedPart) -> None:
        self.done.append(result.place)


@pytest.mark.parametrize(("bad", "left"), [(0, [0, 1, 2]), (1, [1, 2])])
def test_one_bad_read_keeps_what_was_tokenized(
    config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, left: list[int]
) -> None:
    settings = config(path=str(_three_shards(tmp_path)))
    open_caches(settings)  # which reads for the tokenizer
    reads = itertools.count()
    real = RowGroups.documents

    def documents(part: RowGroups) -> Iterator[str]:
        if next(reads) == bad:
            raise ValueError("a range of a file was cut")
        return real(part)

    monkeypatch.setattr(stream_writer, "_COMMIT_SECONDS", 0)
    monkeypatch.setattr(RowGroups, "documents", documents)
    with pytest.raises(ValueError, match="was cut"):
        prepare(settings)
    assert len(list((tmp_path / "cache").glob(".data-*.growing"))) == (1 if bad else 0), "nothing useless stays"
    noted = Noted()
    prepare(settings, progress=lambda: noted)
    assert noted.done == left


def _three_shards(folder: Path) -> Path:
    for number in range(3):
        write_shard(folder / "mirror" / f"{number}.parquet", [text(i) for i in range(number, NUM_DOCUMENTS, 3)])
    return folder / "mirror"


KILLED = """
import json, os, sys
from sdp_deepspeed.data import stream_writer
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.prepare import prepare
stream_writer._COMMIT_SECONDS = 0
commit = stream_writer.StreamWriter._commit
stream_writer.StreamWriter._commit = lambda writer, files: (commit(writer, files), os.kill(os.getpid(), 9))
prepare(DataConfig(**json.loads(sys.argv[1])))
"""


def test_a_killed_command_goes_on_where_it_was(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    """The whole way, with a tokenizer and a lock that a killed process left."""
    (tmp_path / "killed.py").write_text(KILLED)
    settings = vars(config(path=str(_three_shards(tmp_path))))
    command = [sys.executable, str(tmp_path / "killed.py"), json.dumps(settings)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == -9
    (growing,) = (tmp_path / "cache").glob(".data-*.growing")
    before = (growing / "train.bin").read_bytes()
    assert before
    noted = Noted()
    folder = prepare(DataConfig(**settings), progress=lambda: noted)
    assert noted.done == [1, 2]
    assert (folder / "train.bin").read_bytes().startswith(before)
    fresh = prepare(DataConfig(**settings | {"cache_dir": str(tmp_path / "fresh")}))
    assert fresh.name == folder.name
    for name in ("train.bin", "validation.bin"):
        assert (fresh / name).read_bytes() == (folder / name).read_bytes()
