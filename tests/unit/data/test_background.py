"""Tokenizing beside training: what a rank's process does, and what all ranks learn when it fails or ends."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sdp_deepspeed.data import DataConfig, PreparedDataError, build
from sdp_deepspeed.data.background import BackgroundWriter, problem_path, raise_problem, write_problem
from sdp_deepspeed.data.bundle import DataBundle
from sdp_deepspeed.data.cache import open_caches
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.stream_writer import Wanted
from sdp_deepspeed.data.streaming import _look_at_disk, start_writers
from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.lock_owner import machine
from tests.helpers.documents import NUM_DOCUMENTS, numbers, text
from tests.helpers.fineweb import split, write_shard
from tests.helpers.gatherers import ThreadGatherer, outcomes_of
from tests.helpers.own_processes import own_processes


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A mirror of three shards, one of them without rows."""
    pages = [text(number) for number in range(NUM_DOCUMENTS)]
    for name, some in {"000": pages[::2], "001": [], "002": pages[1::2]}.items():
        write_shard(tmp_path / "mirror" / f"{name}_00000.parquet", some, rows=20)
    settings: dict[str, Any] = {
        "source": "files",
        "path": str(tmp_path / "mirror"),
        "vocab_size": 400,
        "sequence_length": 16,
        "validation_fraction": 0.1,
        "validation_blocks": 10,
        "tokenize": "during",
        "shuffle_window": 20,
        "workers": 1,
        "cache_dir": str(tmp_path / "cache"),
    }
    return lambda **changes: DataConfig.from_dict(settings | changes)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for process in _writers():
        process.kill()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[BackgroundWriter]:
    """Those that are started."""
    found: list[BackgroundWriter] = []
    start = BackgroundWriter.start

    def noted(writer: BackgroundWriter) -> None:
        found.append(writer)
        start(writer)

    monkeypatch.setattr(BackgroundWriter, "start", noted)
    return found


def _writers() -> list[psutil.Process]:
    return own_processes("sdp_deepspeed.data.background")


def _bundles(config: DataConfig, num_ranks: int) -> list[Any]:
    def run(rank: int, group: ThreadGatherer) -> DataBundle:
        return build(config, micro_batch=2, rank=rank, world_size=num_ranks, communicator=group)

    return outcomes_of(num_ranks, run)


def _seen(bundle: DataBundle, count: int) -> set[int]:
    """Numbers of documents in that many batches."""
    batches = itertools.islice(bundle.train, count)
    return numbers("|".join(text for b in batches for text in bundle.tokenizer.batch_decode(b["input_ids"])))


def test_trains_on_what_a_prepared_cache_would_have(
    config: Callable[..., DataConfig], started: list[BackgroundWriter]
) -> None:
    """One process for the ranks of a machine; held-out text is the same, and never trained on."""
    bundles = _bundles(config(), 3)
    assert len(started) == 1
    assert all(bundle.train.state_dict()["window"] == 20 for bundle in bundles)
    held_out = {number for number in range(NUM_DOCUMENTS) if text(number) in split([text(number)], 0.1)["validation"]}
    evaluated: set[int] = set()
    for bundle in bundles:
        assert bundle.validation is not None
        assert bundle.validation.num_blocks == 10
        for batch, _ in bundle.validation:
            evaluated |= numbers("|".join(bundle.tokenizer.batch_decode(batch["input_ids"])))
    assert evaluated
    assert evaluated <= held_out
    trained: set[int] = set()
    while bundles[0].train.num_blocks is None or bundles[0].train.epoch < 1.1:
        for bundle in bundles:
            trained |= _seen(bundle, 1)
    assert not trained & held_out
    assert len(trained) > NUM_DOCUMENTS - len(held_out) - 3
    assert started[0]._process.wait(20) == 0, "it has written all"
    folder = bundles[0].prepared.folder.parent
    prepared = PreparedData.load(next(folder.glob("data-*")))
    before = prepare(config(tokenize=None, shuffle_window=None))
    assert before == prepared.folder, "the same cache"
    assert bundles[0].train.num_blocks == len(prepared.blocks("train", 16))


def test_the_process_says_what_it_does(config: Callable[..., DataConfig], capfd: pytest.CaptureFixture[str]) -> None:
    (bundle,) = _bundles(config(), 1)
    assert f"data: preparing files text (once, then cached in {bundle.prepared.folder.parent}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"text_column": "token_count"}, "holds int64, expected text"), ({"max_bytes": 3}, "no document with text")],
)
def test_a_mistake_is_every_ranks_error_at_start(
    config: Callable[..., DataConfig], changes: dict[str, Any], said: str
) -> None:
    errors = _bundles(config(**changes), 2)
    assert all(isinstance(error, ValueError) and said in str(error) for error in errors), errors


def test_a_damaged_shard_is_every_ranks_error(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    """Where only the process that tokenizes reads it: the tokenizer is there already."""
    prepare(config(tokenize=None, shuffle_window=None, validation_fraction=0.1))
    tokenizer = str(next((tmp_path / "cache").glob("tokenizer-*")))
    file = tmp_path / "mirror" / "002_00000.parquet"
    file.write_bytes(b"PAR1 nothing")
    errors = _bundles(config(tokenizer=tokenizer, vocab_size=None), 2)
    assert all(isinstance(error, ValueError) and f"{file}: cannot be read" in str(error) for error in errors), errors


def test_a_killed_process_ends_the_run_on_every_rank(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BackgroundWriter.start

    def start_and_kill(writer: BackgroundWriter) -> None:
        start(writer)
        for process in _writers():
            process.kill()

    monkeypatch.setattr(BackgroundWriter, "start", start_and_kill)
    errors = _bundles(config(), 2)
    assert all(isinstance(error, PreparedDataError) for error in errors), errors
    assert all("the process that tokenizes beside training ended (exit code -9)" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a\n b"), ValueError),
        (ConnectionError("a b"), OSError),
        (RuntimeError("a b"), PreparedDataError),
        (KeyError("a b"), PreparedDataError),
    ],
)
def test_a_problem_keeps_its_kind(tmp_path: Path, error: Exception, kind: type[Exception]) -> None:
    raise_problem(problem_path(tmp_path / "data-0", "job"))
    write_problem(problem_path(tmp_path / "data-0", "job"), error)
    with pytest.raises(kind, match="a b"):
        raise_problem(problem_path(tmp_path / "data-0", "job"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"kind": "ValueError", "sa'])
def test_a_problem_that_cannot_be_read_is_one(tmp_path: Path, content: bytes) -> None:
    problem_path(tmp_path / "data-0", "job").write_bytes(content)
    with pytest.raises(PreparedDataError, match=r"tokenizing failed, and .* cannot be read"):
        raise_problem(problem_path(tmp_path / "data-0", "job"))


def test_a_new_process_forgets_what_an_earlier_one_said(config: Callable[..., DataConfig]) -> None:
    (cache,) = open_caches(config())
    problem = problem_path(cache.folder, "job")
    write_problem(problem, ValueError("earlier"))
    writer = BackgroundWriter(cache, "job")
    writer.start()
    raise_problem(problem)
    writer.stop()
    writer.tell(Wanted())  # nobody listens, which `look` tells
    writer.look()
    with pytest.raises(PreparedDataError, match="exit code -9"):
        raise_problem(problem)


def test_a_problem_is_that_of_its_own_job(config: Callable[..., DataConfig]) -> None:
    """Another job with the same cache goes on, and writes itself."""
    caches = open_caches(config())
    (writer,) = start_writers(config(), caches, OneRank())
    write_problem(problem_path(caches[0].folder, f"{machine()}.1"), ValueError("of another job"))
    writer.raise_problem()
    write_problem(problem_path(caches[0].folder, f"{machine()}.{os.getpid()}"), ValueError("of this one"))
    with pytest.raises(ValueError, match="of this one"):
        writer.raise_problem()


def test_several_sources_are_written_at_once(
    config: Callable[..., DataConfig], tmp_path: Path, started: list[BackgroundWriter]
) -> None:
    other = "".join(json.dumps({"text": f"[{number}] other text\n" * 3}) + "\n" for number in range(200))
    (tmp_path / "other.jsonl").write_text(other)
    sources = [
        {"source": "files", "path": str(tmp_path / "mirror"), "weight": 3},
        {"source": "files", "path": str(tmp_path / "other.jsonl"), "weight": 1},
    ]
    settings = {"source": "stdlib", "path": None, "sources": sources}
    bundle, other_shard = outcomes_of(
        2, lambda rank, group: build(config(**settings), micro_batch=2, rank=0, world_size=1, communicator=group)
    )
    assert len(started) == 2
    batches = [next(bundle.train) for _ in range(200)]
    assert all(torch.equal(batch["input_ids"], next(other_shard.train)["input_ids"]) for batch in batches), (
        "ranks of a tensor-parallel group"
    )
    blocks = [text for batch in batches for text in _decoded(bundle, batch)]
    share = sum("other text" in text for text in blocks) / len(blocks)
    # 400 samples of a shuffled period: the standard deviation of the share is 0.02.
    assert 0.15 < share < 0.35
    (before,) = _bundles(config(**settings, tokenize=None, shuffle_window=None), 1)
    assert sum(len(batch["labels"]) for batch, _ in bundle.validation) == sum(
        len(batch["labels"]) for batch, _ in before.validation
    )


@pytest.mark.parametrize("differ", [False, True])
def test_machines_with_disks_of_their_own_need_the_same_text(
    config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differ: bool
) -> None:
    """A rank on each of two, with a given tokenizer: else the second one's text would pass for the first's."""
    own, ranks = tmp_path / "own", threading.local()
    shutil.copytree(tmp_path / "mirror", own)
    if differ:
        os.utime(own / "002_00000.parquet", (1, 1))
    tokenizer = str(open_caches(config())[0].tokenizer.folder)
    monkeypatch.setattr("sdp_deepspeed.data.streaming.machine", lambda: f"machine {ranks.rank}")
    monkeypatch.setattr("sdp_deepspeed.data.streaming._look_at_disk", lambda caches: (ranks.rank, 0))

    def run(rank: int, group: ThreadGatherer) -> Any:
        ranks.rank = rank
        path = str(own if rank else tmp_path / "mirror")
        mine = config(tokenizer=tokenizer, vocab_size=None, path=path, cache_dir=str(tmp_path / f"cache{rank}"))
        return build(mine, micro_batch=2, rank=rank, world_size=2, communicator=group)

    outcomes = outcomes_of(2, run)
    if not differ:
        assert all(isinstance(outcome, DataBundle) for outcome in outcomes), outcomes
        return
    assert all(isinstance(error, ValueError) for error in outcomes), outcomes
    assert all("files differ from those on rank 0's machine" in str(error) for error in outcomes), outcomes


def test_machines_that_share_a_cache_are_told_by_it(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    caches, others = (open_caches(config(cache_dir=str(tmp_path / name))) for name in "ab")
    assert _look_at_disk(caches) == _look_at_disk(caches) != _look_at_disk(others)
    shutil.rmtree(caches[0].tokenizer.folder)
    assert _look_at_disk(caches) is None


def _decoded(bundle: DataBundle, batch: dict[str, Any]) -> list[str]:
    texts: list[str] = bundle.tokenizer.batch_decode(batch["input_ids"])
    return texts
