"""Orders of blocks: that of a stream is the same however it grows, and goes on anywhere, also without its cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sdp_deepspeed.data import PackedBatches, row_groups
from sdp_deepspeed.data.block_order import ShuffledBlocks, StreamedBlocks
from sdp_deepspeed.data.growing import NO_WRITER, GrowingTokens
from sdp_deepspeed.data.mixed_blocks import MixedBlocks
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.shuffle import shuffled
from sdp_deepspeed.data.source_mix import PERIOD
from sdp_deepspeed.data.stream_writer import Wanted
from tests.helpers.streams import Demand, SmallStream, blocks_of, small_stream, writing

LENGTH = 8
WINDOW = 7


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> SmallStream:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PART_BYTES", 1)
        return small_stream(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def blocks(stream: SmallStream) -> npt.NDArray[Any]:
    """All blocks of the training text, by the plain tokenizer."""
    return blocks_of(stream.expected()["train"], LENGTH)


def _reference(blocks: npt.NDArray[Any], count: int, *, seed: int) -> list[list[int]]:
    """The first samples, written down: windows in the first epoch, then permutations of all."""
    order: list[int] = []
    for number, start in enumerate(range(0, len(blocks), WINDOW)):
        size = min(WINDOW, len(blocks) - start)
        order += (start + shuffled(np.arange(size), num_items=size, seed=seed, epoch=number)).tolist()
    epoch = 0
    while len(order) < count:
        epoch += 1
        order += shuffled(np.arange(len(blocks)), num_items=len(blocks), seed=seed, epoch=epoch).tolist()
    return [blocks[item].tolist() for item in order[:count]]


def _order(tokens: GrowingTokens, *, seed: int = 3, data: str = "a") -> StreamedBlocks:
    return StreamedBlocks(tokens, sequence_length=LENGTH, seed=seed, window=WINDOW, data=data)


def _take(
    tokens: GrowingTokens, count: int, *, ranks: int, micro_batch: int, state: dict[str, Any] | None = None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Samples of all ranks in their global order, and the state after them."""
    loaders = [
        PackedBatches(_order(tokens), micro_batch=micro_batch, rank=rank, world_size=ranks) for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    found: list[list[int]] = []
    for _ in range(count // (ranks * micro_batch)):
        for loader in loaders:
            found += next(loader)["input_ids"].tolist()
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    return found, json.loads(json.dumps(states[0]))


def test_the_order_is_as_it_is_written_down(stream: SmallStream, blocks: npt.NDArray[Any], tmp_path: Path) -> None:
    """Of two epochs and a half; the first one's last window is a short one."""
    assert len(blocks) % WINDOW
    count = 5 * len(blocks) // 2 // 6 * 6
    with writing(stream, tmp_path / "growing") as (tokens, _):
        found, _ = _take(tokens, count, ranks=2, micro_batch=3)
    assert found == _reference(blocks, count, seed=3)
    first = found[: len(blocks)]
    assert sorted(first) == sorted(blocks.tolist()), "every block once"


@pytest.mark.parametrize(("ranks", "micro_batch"), [(3, 1), (1, 6), (6, 2)])
@pytest.mark.parametrize("at", [0, 12, 48, "end", "later"])
@pytest.mark.parametrize("lost", [False, True])
def test_resumes_exactly_at_other_ranks_also_without_its_cache(
    stream: SmallStream,
    blocks: npt.NDArray[Any],
    tmp_path: Path,
    ranks: int,
    micro_batch: int,
    at: int | str,
    lost: bool,
) -> None:
    stop = {"end": len(blocks) // 12 * 12, "later": (len(blocks) + 30) // 12 * 12}.get(str(at)) or int(at)
    with writing(stream, tmp_path / "growing") as (tokens, _):
        _, state = _take(tokens, stop, ranks=2, micro_batch=3)
    target = tmp_path / ("other" if lost else "growing")
    with writing(stream, target) as (tokens, demand):
        found, _ = _take(tokens, 36, ranks=ranks, micro_batch=micro_batch, state=state)
    assert found == _reference(blocks, stop + 36, seed=3)[stop:]
    if lost and at == 48:
        assert min(demand.counted) > 0, "what is before the window is not tokenized again"


def test_the_writer_is_one_window_ahead_and_no_more(stream: SmallStream, tmp_path: Path) -> None:
    with writing(stream, tmp_path / "growing") as (tokens, demand):
        order = _order(tokens)
        order.wait(0, 3)
        order.wait(3, 6)
        assert [(wanted.first, wanted.stop) for wanted in demand.told] == [(0, 2 * WINDOW * LENGTH)]
        order.wait(6, 9)
        assert demand.told[-1].stop == 3 * WINDOW * LENGTH
        assert order.num_blocks is None
        order.wait(9 * WINDOW, 9 * WINDOW + 1)


def test_too_little_text_is_told(stream: SmallStream, tmp_path: Path) -> None:
    with writing(stream, tmp_path / "growing", max_bytes=10) as (tokens, _):
        order = _order(tokens)
        with pytest.raises(PreparedDataError, match="the training split has less than one block of 8 tokens"):
            order.wait(0, 1)


def test_tokens_that_came_right_before_a_problem_are_taken(
    stream: SmallStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that looked a moment later takes them, and would wait for this one."""
    target, demand = tmp_path / "growing", Demand(Wanted())
    writer = replace(NO_WRITER, problem=tmp_path / "problem")
    tokens = GrowingTokens(tmp_path / "complete", target, vocab_size=stream.vocab_size, writer=writer)

    def all_comes_then_a_problem(*_: Any) -> None:
        if not demand.counted:
            stream.writer(target).write(demand, on_part=demand.on_part)
        raise ValueError("no more")

    monkeypatch.setattr("sdp_deepspeed.data.growing.raise_problem", all_comes_then_a_problem)
    assert tokens.wait("train", 0, LENGTH) == LENGTH
    empty = GrowingTokens(tmp_path / "other", tmp_path / "nothing", vocab_size=stream.vocab_size, writer=writer)
    with pytest.raises(ValueError, match="no more"):
        empty.wait("train", 0, LENGTH)


def test_a_state_of_another_window_is_refused(stream: SmallStream, tmp_path: Path) -> None:
    with writing(stream, tmp_path / "growing") as (tokens, _):
        loader = PackedBatches(_order(tokens), micro_batch=1)
        for key, value in {"window": 9, "seed": 4, "sequence_length": 16, "data": "b"}.items():
            with pytest.raises(ValueError, match=f"cannot resume the position in the data: {key} was"):
                loader.load_state_dict(loader.state_dict() | {key: value})


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_of_the_other_tokenize_is_refused(stream: SmallStream, tmp_path: Path, mixed: bool) -> None:
    orders: list[Any] = [ShuffledBlocks(np.zeros((5, LENGTH), np.uint16), seed=3)]
    with writing(stream, tmp_path / "growing") as (tokens, _):
        orders.append(_order(tokens, data=""))
        if mixed:
            orders = [MixedBlocks([order, order], (PERIOD // 2, PERIOD // 2), seed=3) for order in orders]
        before, during = (PackedBatches(order, micro_batch=1) for order in orders)
        with pytest.raises(ValueError, match='started with tokenize "before", now it is "during": set it back'):
            during.load_state_dict(before.state_dict())
        with pytest.raises(ValueError, match='started with tokenize "during", now it is "before": set it back'):
            before.load_state_dict(during.state_dict())


def test_other_seeds_give_other_orders(stream: SmallStream, tmp_path: Path) -> None:
    with writing(stream, tmp_path / "growing") as (tokens, _):
        found = []
        for seed in (0, 1):
            order = _order(tokens, seed=seed)
            order.wait(0, WINDOW)
            found.append(order.blocks(np.arange(WINDOW)).tolist())
    assert found[0] != found[1]
    assert sorted(found[0]) == sorted(found[1])


def test_blocks_that_are_all_there_know_their_number() -> None:
    order = ShuffledBlocks(np.arange(20).reshape(5, 4).astype(np.uint16))
    assert order.num_blocks == 5
    assert order.go_to(order.position(13)) == 13
    assert sorted(order.blocks(np.arange(5)).ravel().tolist()) == list(range(20))


def test_a_complete_cache_needs_no_writer(stream: SmallStream, blocks: npt.NDArray[Any], tmp_path: Path) -> None:
    target = tmp_path / "complete"
    demand = Demand()
    stream.writer(target).write(Wanted, on_part=demand.on_part)
    (target / "meta.json").write_text("{}")
    tokens = GrowingTokens(target, tmp_path / "growing", vocab_size=stream.vocab_size)
    found, _ = _take(tokens, len(blocks) // 6 * 6, ranks=2, micro_batch=3)
    assert found == _reference(blocks, len(found), seed=3)
