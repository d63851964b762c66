"""What `on_gpu.py sizes` makes of a GPU, on pretended memory; tests/launcher/test_on_gpu.py runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.sizes import cells as cells_module
from benchmarks.sizes.cells import GB, Cell, cells, is_done, measure, shape_of
from benchmarks.sizes.largest import MOST_ROWS, guessed_rows, largest
from benchmarks.sizes.peaks import peak_flops
from benchmarks.sizes.subjects import SUBJECTS


def test_peaks_of_known_gpus() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-40GB": 312, "NVIDIA L4": 121}
    assert {name: peak_flops(name) for name in names} == {name: peak * 1e12 for name, peak in names.items()}
    assert [peak_flops(name) for name in ("CPU", "NVIDIA A10G", "NVIDIA GH200 480GB", "Tesla V100-SXM2-16GB")] == [
        None
    ] * 4


@pytest.mark.parametrize("truth", [0, 1, 2, 7, 64, 99, 1000, MOST_ROWS, 5 * MOST_ROWS])
@pytest.mark.parametrize("guess", [-3, 1, 6, 63, 64, 65, 400, 10**6])
def test_the_largest_was_tried_and_one_more_was_too(truth: int, guess: int) -> None:
    tried: list[int] = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= truth

    found = largest(fits, guess)
    assert found == min(truth, MOST_ROWS)
    assert len(tried) == len(set(tried))
    assert found in tried or found == 0
    assert found + 1 in tried or found == MOST_ROWS
    assert all(1 <= rows <= MOST_ROWS for rows in tried)
    distance = abs(min(max(guess, 1), MOST_ROWS) - found)
    assert len(tried) <= 2 * math.log2(distance + 2) + 2


def test_a_line_says_where_to_begin() -> None:
    assert guessed_rows({1: 10 * GB, 4: 16 * GB}, 40 * GB) == 16
    assert guessed_rows({4: 16 * GB, 1: 10 * GB}, 8 * GB) == 0
    assert guessed_rows({1: GB, 4: GB}, 2 * GB) > 10**6  # no slope: anything goes


@dataclass
class FakeMemory:
    """Of a device of 60 GB on which a rank has `at_rest` bytes, and a row takes `of_a_row`.

    Args:
        bends: from so many rows on a row takes twice as much, which no line foresees.
    """

    at_rest: int
    of_a_row: int
    bends: int = 10**6
    limit: int = 60 * GB
    now: int = 0

    def need(self, rows: int) -> int:
        return self.at_rest + self.of_a_row * (rows + max(0, rows - self.bends))

    def reset(self) -> None:
        self.now = 0

    def peak(self) -> int:
        return self.now

    def total(self) -> int:
        return 60 * GB

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        before, self.limit = self.limit, limit
        try:
            yield
        finally:
            self.limit = before


@dataclass
class FakeRank:
    """One product [rows * length, 8] x [8, 8]. After an error it must not be used again."""

    memory: FakeMemory
    module: Any = field(default_factory=lambda: SimpleNamespace(gradient_checkpointing_enable=lambda **_: None))
    is_broken: bool = False
    is_closed: bool = False

    def step(self, tokens: torch.Tensor) -> None:
        assert not self.is_broken
        assert not self.is_closed
        self.memory.now = max(self.memory.now, self.memory.need(len(tokens)))
        if self.memory.need(len(tokens)) > self.memory.limit:
            self.is_broken = True
            raise torch.OutOfMemoryError("pretended\nat length")
        torch.ones(tokens.numel(), 8) @ torch.ones(8, 8)

    def close(self) -> None:
        self.is_closed = True


CELL = Cell("tiny", "pretended", False, rows=4, sequence=16)


@dataclass
class Measured:
    figures: dict[str, Any]
    ranks: list[FakeRank]


def measured(monkeypatch: pytest.MonkeyPatch, memory: FakeMemory) -> Measured:
    ranks: list[FakeRank] = []

    def build(_: Any) -> FakeRank:
        ranks.append(FakeRank(memory))
        return ranks[-1]

    monkeypatch.setitem(SUBJECTS, "pretended", build)
    monkeypatch.setattr(cells_module, "device_memory", lambda: memory)
    monkeypatch.setattr(cells_module, "peak_flops", lambda name: 1e9)
    return Measured(measure(CELL, shape_of("tiny"), repeats=3), ranks)


@pytest.mark.parametrize("bends", [10**6, 12])
def test_what_fits_was_run(bends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(10 * GB, GB // 2, bends)
    done = measured(monkeypatch, memory)
    found = done.figures["largest"]
    for limit in (24, 40):
        rows = found[str(limit)]["rows"]
        assert memory.need(rows) <= limit * GB < memory.need(rows + 1)
        assert found[str(limit)]["peak"] == memory.need(rows)
        assert found[str(limit)]["seconds"] > 0
    assert found["80"] is None, "this device has 60 GB"
    assert done.figures["peaks"] == {1: memory.need(1), 4: memory.need(4)}
    assert all(rank.is_closed for rank in done.ranks)
    assert all(earlier.is_broken for earlier, _ in pairwise(done.ranks))  # built anew for no other reason


def test_what_does_not_fit_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done = measured(monkeypatch, FakeMemory(30 * GB, GB))
    assert done.figures["largest"]["24"] == {"rows": 0}
    done = measured(monkeypatch, FakeMemory(70 * GB, GB))
    assert done.figures["not_measured"] == "pretended"
    assert done.figures["largest"] is None
    assert done.ranks[-1].is_closed


def test_utilization_is_of_the_models_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(monkeypatch, FakeMemory(GB, GB)).figures
    assert figures["flops"] == 4 * 16 * 2 * 8 * 8
    seconds = sorted(figures["seconds"])[1]
    assert figures["mfu"] == pytest.approx(figures["flops"] / seconds / 1e9)
    assert figures["tokens_per_second"] == pytest.approx(64 / seconds)


def test_cells_are_chosen_by_name() -> None:
    every = list(cells(["134M", "1B"], "", rows=4, sequence=8))
    assert len(every) == 2 * 2 * len(SUBJECTS)
    named = [cell.name for cell in cells(["134M", "1B"], "1B.*C=0.25$", rows=4, sequence=8)]
    assert len(named) == 4
    assert named[0] == "1B, forward x block, C=0.25"
    with pytest.raises(ValueError, match="is in no name such as '134M, DDP'"):
        list(cells(["134M"], "nothing", rows=4, sequence=8))
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        list(cells(["134M"], "(", rows=4, sequence=8))


def test_what_is_done_is_done_on_this_device() -> None:
    result = asdict(CELL) | {"device": "CPU", "seconds": [1.0]}
    assert is_done(CELL, [result])
    for key, value in (("device", "H100"), ("rows", 8), ("checkpointing", True)):
        assert not is_done(CELL, [result | {key: value}])
