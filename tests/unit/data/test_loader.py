"""Shards and resumption of batches."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data import PackedBatches, ValidationBatches
from sdp_deepspeed.data.block_order import ShuffledBlocks
from tests.helpers.properties import examples


def _blocks(num_blocks: int, sequence_length: int = 4) -> npt.NDArray[Any]:
    """Block i holds i in every place, so that a batch tells which blocks it took."""
    return np.repeat(np.arange(num_blocks, dtype="<u2")[:, None], sequence_length, axis=1)


def _order(num_blocks: int, *, seed: int = 0, data: str = "") -> ShuffledBlocks:
    return ShuffledBlocks(_blocks(num_blocks), seed=seed, data=data)


def _taken(loader: PackedBatches, num_batches: int) -> list[int]:
    batches = itertools.islice(loader, num_batches)
    return [int(i) for batch in batches for i in batch["input_ids"][:, 0]]


def _global(num_blocks: int, *, ranks: int, micro_batch: int, num_batches: int, state: Any = None) -> tuple[Any, Any]:
    """All ranks' samples in the order of the global positions, and the state after them."""
    loaders = [
        PackedBatches(_order(num_blocks, seed=5), micro_batch=micro_batch, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    samples = [i for _ in range(num_batches) for loader in loaders for i in _taken(loader, 1)]
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    return samples, json.loads(json.dumps(states[0]))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 20))
@examples(30)
def test_ranks_share_an_epoch_without_overlap_or_gap(ranks: int, micro_batch: int, extra: int) -> None:
    num_blocks = ranks * micro_batch + extra
    num_batches = 3 * num_blocks // (ranks * micro_batch) + 1
    samples, _ = _global(num_blocks, ranks=ranks, micro_batch=micro_batch, num_batches=num_batches)
    for epoch in range(3):
        assert sorted(samples[epoch * num_blocks : (epoch + 1) * num_blocks]) == list(range(num_blocks))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 3), (3, 2), (1, 6), (6, 1), (4, 3)])
def test_resumes_exactly_also_at_other_ranks_and_micro_batches(ranks: int, micro_batch: int) -> None:
    # 10 batches of 6 samples over 13 blocks: the interruption lies in the fifth epoch.
    straight, _ = _global(13, ranks=2, micro_batch=3, num_batches=20)
    before, state = _global(13, ranks=2, micro_batch=3, num_batches=10)
    assert (state["epoch"], state["position"]) == divmod(60, 13)
    after, _ = _global(13, ranks=ranks, micro_batch=micro_batch, num_batches=60 // (ranks * micro_batch), state=state)
    assert before + after == straight


@pytest.mark.parametrize("sizes", [(3, 1, 6, 2), (6, 6, 1, 3)])
def test_steps_take_the_same_blocks_at_any_micro_batch(sizes: tuple[int, ...]) -> None:
    """Steps of 12 samples on 2 ranks over 13 blocks, where the micro-batch changes after each step."""
    loaders = [PackedBatches(_order(13, seed=5), micro_batch=6, rank=rank, world_size=2) for rank in range(2)]
    straight, _ = _global(13, ranks=2, micro_batch=6, num_batches=len(sizes))
    for step, size in enumerate(sizes):
        for loader in loaders:
            loader.micro_batch = size
        taken = [i for _ in range(6 // size) for loader in loaders for i in _taken(loader, 1)]
        assert taken == straight[12 * step : 12 * step + 12]
        assert {loader.micro_batch for loader in loaders} == {size}
    with pytest.raises(ValueError, match="with micro-batch 7 needs 14"):
        loaders[0].micro_batch = 7
    assert loaders[0].micro_batch == sizes[-1]


def test_batch_is_what_a_causal_model_takes() -> None:
    loader = PackedBatches(ShuffledBlocks(_blocks(9, 5)), micro_batch=2)
    batch = next(loader)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 5)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    assert (loader.state_dict()["position"], loader.epoch) == (2, 2 / 9)


def test_seed_and_epoch_change_the_order() -> None:
    loader = PackedBatches(_order(50), micro_batch=5)
    assert _taken(loader, 10) != _taken(loader, 10)
    first, second = (PackedBatches(_order(50, seed=seed), micro_batch=5) for seed in (0, 1))
    assert _taken(first, 10) != _taken(second, 10)


def test_too_few_blocks_is_an_error_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"7 blocks of 4 tokens, one step of 4 ranks with micro-batch 2 needs 8"):
        PackedBatches(_order(7), micro_batch=2, rank=0, world_size=4)


@pytest.mark.parametrize("shard", [{"micro_batch": 0}, {"micro_batch": 1, "rank": 2, "world_size": 2}])
def test_impossible_shards_are_errors(shard: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PackedBatches(_order(7), **shard)
    with pytest.raises(ValueError, match="expected"):
        ValidationBatches(_blocks(7), **shard)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 9}, "seed was 9, is 5"),
        ({"num_blocks": 14}, "num_blocks was 14, is 13"),
        ({"data": "b"}, "data was 'b', is 'a'"),
        ({"version": 2}, "version 2, expected 1"),
    ],
)
def test_state_of_other_data_is_refused(change: dict[str, Any], said: str) -> None:
    loader = PackedBatches(_order(13, seed=5, data="a"), micro_batch=1)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=said):
        loader.load_state_dict(state | change)
    with pytest.raises(ValueError, match="it lacks"):
        loader.load_state_dict({"epoch": 0})
    loader.load_state_dict(state)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(1, 50))
@examples(60)
def test_validation_counts_every_block_once(num_blocks: int, ranks: int, micro_batch: int, limit: int | None) -> None:
    all_ranks = [
        ValidationBatches(_blocks(num_blocks), micro_batch=micro_batch, rank=rank, world_size=ranks, limit=limit)
        for rank in range(ranks)
    ]
    assert len({len(list(batches)) for batches in all_ranks} | {len(all_ranks[0])}) == 1
    counted: list[int] = []
    for batch, weight in itertools.chain(*all_ranks):
        assert batch["input_ids"].shape == (micro_batch, 4)
        real = weight // 3
        counted += batch["input_ids"][:real, 0].tolist()
        # Cross entropy must have something to average, or NaN * 0 would spoil the sum.
        assert (batch["labels"] != -100).any()
        assert weight == 0 or (batch["labels"][real:] == -100).all()
    expected = num_blocks if limit is None else min(limit, num_blocks)
    assert len(counted) == len(set(counted)) == expected


def test_validation_loss_does_not_depend_on_the_ranks() -> None:
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(ranks: int, micro_batch: int) -> float:
        total = weights = 0.0
        for rank in range(ranks):
            for batch, weight in ValidationBatches(_blocks(11), micro_batch=micro_batch, rank=rank, world_size=ranks):
                logits, labels = table[batch["input_ids"][:, :-1]], batch["labels"][:, 1:]
                mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                total, weights = total + float(mean) * weight, weights + weight
        return total / weights

    for shard in [(2, 2), (3, 4), (4, 1), (8, 2)]:
        # Sums of 11 float64 means in another order.
        assert loss(*shard) == pytest.approx(loss(1, 11), rel=1e-14)


def test_no_held_out_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="validation split has no block"):
        ValidationBatches(_blocks(0), micro_batch=1)
