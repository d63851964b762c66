"""From text to batches on every rank: the cache, the split, the tokenizer, and failures that all ranks learn."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.packing import PreparedData, is_held_out
from sdp_deepspeed.data.prepare import prepare
from tests.helpers.gatherers import ThreadGatherer, outcomes_of

NUM_DOCUMENTS = 300


def _text(number: int) -> str:
    return f"<{number}> document {number} says <{number}> again: naïve café {number * 7919}\n" * (1 + number % 3)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    with (tmp_path / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": _text(number)}) + "\n" for number in range(NUM_DOCUMENTS))
    defaults: dict[str, Any] = {
        "source": "files",
        "path": str(tmp_path / "data.jsonl"),
        "vocab_size": 400,
        "sequence_length": 16,
        "validation_fraction": 0.1,
        "cache_dir": str(tmp_path / "cache"),
    }
    return lambda **changes: DataConfig.from_dict(defaults | changes)


def _numbers(text: str) -> set[int]:
    # With both brackets, since a block's edge may cut a number.
    return {int(number) for number in re.findall(r"<(\d+)>", text)}


def test_no_training_batch_touches_a_held_out_document(config: Callable[..., DataConfig]) -> None:
    def run(rank: int, group: ThreadGatherer) -> Any:
        return build(config(), micro_batch=2, rank=rank, world_size=3, communicator=group)

    bundles = outcomes_of(3, run)
    trained: set[int] = set()
    evaluated: set[int] = set()
    for bundle in bundles:
        assert bundle.validation is not None
        # More than two epochs, so that every training block is seen by some rank.
        for batch in itertools.islice(bundle.train, 2 * bundle.train.num_blocks // 6 + 1):
            trained |= _numbers("|".join(bundle.tokenizer.batch_decode(batch["input_ids"])))
        for batch, _ in bundle.validation:
            evaluated |= _numbers("|".join(bundle.tokenizer.batch_decode(batch["input_ids"])))
    held_out = {number for number in range(NUM_DOCUMENTS) if is_held_out(_text(number), 0.1)}
    assert 15 < len(held_out) < 45
    assert not trained & held_out
    assert evaluated <= held_out
    # The last, incomplete block may hide a document or two.
    assert len(trained) > NUM_DOCUMENTS - len(held_out) - 3


def test_streams_are_the_documents_with_ends_between(config: Callable[..., DataConfig]) -> None:
    prepared = PreparedData.load(prepare(config()))
    tokenizer = prepared.tokenizer()
    for split, held in (("train", False), ("validation", True)):
        tokens = prepared.blocks(split, 1)[:, 0]  # type: ignore[arg-type]
        expected = [_text(i) for i in range(NUM_DOCUMENTS) if is_held_out(_text(i), 0.1) is held]
        documents = tokenizer.decode(tokens.tolist()).split(tokenizers.END_OF_DOCUMENT)
        assert documents == [*expected, ""]
        assert prepared.counts[split].documents == len(expected)
        assert prepared.counts[split].bytes == sum(len(text.encode()) for text in expected)
        assert prepared.counts[split].tokens == len(tokens)


def test_tokenizer_learns_nothing_from_held_out_documents(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, learnt = tokenizers.train_tokenizer, set[int]()

    def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
        texts = list(documents)
        learnt.update(*map(_numbers, texts))
        return real(texts, vocab_size)

    monkeypatch.setattr(tokenizers, "train_tokenizer", train_tokenizer)
    prepare(config())
    assert learnt == {number for number in range(NUM_DOCUMENTS) if not is_held_out(_text(number), 0.1)}


def test_cache_is_used_and_keyed_by_what_matters(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(config())
    for changes in ({"vocab_size": 300}, {"max_bytes": 5000}, {"validation_fraction": 0.2}):
        assert prepare(config(**changes)) != folder
    monkeypatch.setattr(tokenizers, "train_tokenizer", None)
    for changes in ({}, {"sequence_length": 64}, {"seed": 3}, {"validation_blocks": 2}):
        assert prepare(config(**changes)) == folder


def test_settings_of_the_loader_have_an_effect(config: Callable[..., DataConfig]) -> None:
    bundle = build(config(validation_blocks=5, sequence_length=32), micro_batch=2)
    assert bundle.validation is not None
    assert (bundle.validation.num_blocks, bundle.train.sequence_length) == (5, 32)
    assert build(config(validation_fraction=0), micro_batch=2).validation is None
    first, second = (next(build(config(seed=seed), micro_batch=8).train)["input_ids"] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_many_at_once_make_one_cache(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: prepare(config()), range(4)))
    assert len(folders) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folders.pop().name]


def test_failure_leaves_nothing_behind(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document with text within max_bytes 3"):
        prepare(config(max_bytes=3))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_single_document_cannot_be_split(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("words and words\n\n" * 100)
    with pytest.raises(ValueError, match=r'both need text.*text_documents "paragraph"'):
        prepare(config(path=str(tmp_path / "one.txt")))


def test_damaged_and_invisible_caches_are_told(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    folder = prepare(config())
    (folder / "train.bin").write_bytes(b"short")
    with pytest.raises(RuntimeError, match=r"train.bin is damaged \(5 bytes, expected \d+\): delete"):
        build(config(), micro_batch=1)
    with pytest.raises(RuntimeError, match="must be on a file system that all ranks see"):
        PreparedData.load(tmp_path / "elsewhere", wait_seconds=0)


def test_cache_dir_that_cannot_be_made(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir .* cannot be made"):
        prepare(config(cache_dir=str(tmp_path / "file" / "cache")))


def test_mistake_is_every_ranks_error(config: Callable[..., DataConfig]) -> None:
    def run(rank: int, group: ThreadGatherer) -> Any:
        return build(config(text_column="nope"), micro_batch=1, rank=rank, world_size=3, communicator=group)

    errors = outcomes_of(3, run)
    assert all(isinstance(error, ValueError) and "no column 'nope'" in str(error) for error in errors)


def test_a_rank_that_does_not_see_the_cache_stops_all(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PreparedData.load
    ranks = threading.local()

    def load(folder: Path) -> PreparedData:
        return real(folder / "not_mounted", wait_seconds=0) if ranks.rank == 1 else real(folder)

    def run(rank: int, group: ThreadGatherer) -> Any:
        ranks.rank = rank
        return build(config(), micro_batch=1, rank=rank, world_size=3, communicator=group)

    monkeypatch.setattr(PreparedData, "load", load)
    errors = outcomes_of(3, run)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert "[on rank 1]" in str(errors[0])


def test_several_ranks_need_a_process_group(config: Callable[..., DataConfig]) -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed"):
        build(config(), micro_batch=1, rank=0, world_size=2)


def test_the_default_group_must_be_that_of_the_data(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="the process group has 1 ranks, the data 2"):
            build(config(), micro_batch=1, rank=0, world_size=2)
    finally:
        dist.destroy_process_group()
