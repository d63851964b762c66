"""Several texts in one order: shares, epochs of their own, and positions of all of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from sdp_deepspeed.data import PackedBatches
from sdp_deepspeed.data.block_order import ShuffledBlocks
from sdp_deepspeed.data.mixed_blocks import MixedBlocks
from sdp_deepspeed.data.source_mix import PERIOD

SIZES = (5, 40, 11)  # blocks of each source
COUNTS = (1024, 2048, 1024)


def _mixed(*, seed: int = 2) -> MixedBlocks:
    """Every token of a block is 1000 times its source and its number there."""
    tables = [
        np.repeat(1000 * source + np.arange(size, dtype="<u2")[:, None], 4, axis=1) for source, size in enumerate(SIZES)
    ]
    orders = [ShuffledBlocks(table, seed=seed, data=str(number)) for number, table in enumerate(tables)]
    return MixedBlocks(orders, COUNTS, seed=seed)


def _samples(order: MixedBlocks, first: int, stop: int) -> list[int]:
    found: list[int] = order.blocks(np.arange(first, stop))[:, 0].tolist()
    return found


def test_each_source_has_its_share_and_its_own_epochs() -> None:
    order = _mixed()
    samples = _samples(order, 0, 2 * PERIOD)
    for source, (size, count) in enumerate(zip(SIZES, COUNTS, strict=True)):
        mine = [sample - 1000 * source for sample in samples if sample // 1000 == source]
        assert len(mine) == 2 * count
        assert sum(sample // 1000 == source for sample in samples[:PERIOD]) == count
        alone = ShuffledBlocks(np.repeat(np.arange(size, dtype="<u2")[:, None], 4, axis=1), seed=2)
        assert mine == alone.blocks(np.arange(2 * count))[:, 0].tolist(), "as if it were the only one"
    first, second = samples[:PERIOD], samples[PERIOD:]
    assert [sample // 1000 for sample in first] != [sample // 1000 for sample in second]
    assert _samples(_mixed(seed=3), 0, 50) != samples[:50]


def test_any_stretch_can_be_asked_for() -> None:
    order = _mixed()
    whole = _samples(order, 0, PERIOD + 100)
    for first, stop in [(0, 1), (17, 40), (PERIOD - 3, PERIOD + 3), (PERIOD + 50, PERIOD + 100)]:
        assert _samples(order, first, stop) == whole[first:stop]


class Waiting:
    """Notes what is waited for."""

    sequence_length = 4
    num_blocks = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def wait(self, first: int, stop: int) -> None:
        self.asked.append((first, stop))


def test_every_source_is_waited_for_as_far_as_it_is_taken() -> None:
    sources: list[Any] = [Waiting(), Waiting()]
    order = MixedBlocks(sources, (PERIOD - 1, 1))
    for first in range(0, PERIOD, 8):
        order.wait(first, first + 8)
    assert sources[1].asked == [(0, 1)]
    assert sources[0].asked[-1][1] == PERIOD - 1
    assert all(stop == first for (_, stop), (first, _) in itertools.pairwise(sources[0].asked))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(3, 2), (1, 4)])
def test_resumes_exactly_at_other_ranks(ranks: int, micro_batch: int) -> None:
    loader = PackedBatches(_mixed(), micro_batch=6)
    straight = [next(loader)["input_ids"][:, 0].tolist() for _ in range(20)]
    loader = PackedBatches(_mixed(), micro_batch=6)
    for _ in range(10):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    loaders = [PackedBatches(_mixed(), micro_batch=micro_batch, rank=rank, world_size=ranks) for rank in range(ranks)]
    found: list[int] = []
    for one in loaders:
        one.load_state_dict(state)
    for _ in range(60 // (ranks * micro_batch)):
        for one in loaders:
            found += next(one)["input_ids"][:, 0].tolist()
    assert found == list(itertools.chain(*straight[10:]))


def test_other_shares_are_another_order() -> None:
    loader = PackedBatches(_mixed(), micro_batch=1)
    state = loader.state_dict()
    other = PackedBatches(MixedBlocks(_mixed()._orders, (2048, 1024, 1024), seed=2), micro_batch=1)
    with pytest.raises(ValueError, match=r"cannot resume .*counts was \[1024, 2048, 1024\], is \[2048, 1024, 1024\]"):
        other.load_state_dict(state)
