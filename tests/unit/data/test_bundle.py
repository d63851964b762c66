"""From text to batches on every rank: what each sees, and failures that all ranks learn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.tokenize_part import is_held_out
from tests.helpers.documents import NUM_DOCUMENTS, numbers, text
from tests.helpers.gatherers import ThreadGatherer, outcomes_of


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
            trained |= numbers("|".join(bundle.tokenizer.batch_decode(batch["input_ids"])))
        for batch, _ in bundle.validation:
            evaluated |= numbers("|".join(bundle.tokenizer.batch_decode(batch["input_ids"])))
    held_out = {number for number in range(NUM_DOCUMENTS) if is_held_out(text(number), 0.1)}
    assert 15 < len(held_out) < 45
    assert not trained & held_out
    assert evaluated <= held_out
    # The last, incomplete block may hide a document or two.
    assert len(trained) > NUM_DOCUMENTS - len(held_out) - 3


def test_settings_of_the_loader_have_an_effect(config: Callable[..., DataConfig]) -> None:
    bundle = build(config(validation_blocks=5, sequence_length=32), micro_batch=2)
    assert bundle.validation is not None
    assert (bundle.validation.num_blocks, bundle.train.sequence_length) == (5, 32)
    assert build(config(validation_fraction=0), micro_batch=2).validation is None
    first, second = (next(build(config(seed=seed), micro_batch=8).train)["input_ids"] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_source_without_one_block_is_named(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    """Among others the length of a mix does not tell: its order would look for a block without end."""
    (tmp_path / "short.txt").write_text("few words")
    paths = [str(tmp_path / name) for name in ("data.jsonl", "short.txt")]
    sources = [{"source": "files", "path": path, "weight": 1} for path in paths]
    with pytest.raises(ValueError, match=r"short\.txt': less than one block of 16 tokens"):
        build(config(source="stdlib", path=None, sources=sources, validation_fraction=0), micro_batch=1)


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
