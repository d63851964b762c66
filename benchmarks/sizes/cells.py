"""What rank 3 of a world of eight does and takes, by size of the model, by subject, and with activation checkpointing.

`on_gpu.py sizes` runs it: peak, step time, model FLOPs utilization, and the largest micro-batch by memory. All kernels
run but those of collectives (`common/fake_world.py`); cells are independent, and what is done is not done again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.common.device import device, device_name, seconds
from benchmarks.common.models import LLAMAS, Shape
from benchmarks.sizes.largest import DeviceMemory, device_memory, guessed_rows, largest
from benchmarks.sizes.peaks import peak_flops
from benchmarks.sizes.subjects import BUCKET, SUBJECTS, EngineRank, Rank, collect
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.estimate.per_rank import Setup, estimate
from sdp_deepspeed.estimate.precision import Precision

RANK, WORLD_SIZE = 3, 8
GB = 10**9
LIMITS = (24, 40, 80)  # GB of tensors and what lies between them; such GPUs have 2**30 for 10**9, and need the rest


@dataclass(frozen=True)
class Cell:
    """
    Args:
        size: a name of LLAMAS.
        subject: of SUBJECTS.
        checkpointing: of activations, each layer by itself.
        rows: of a micro-batch.
        sequence: tokens of a row.
    """

    size: str
    subject: str
    checkpointing: bool
    rows: int
    sequence: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.subject}{', checkpointing' if self.checkpointing else ''}"


def cells(sizes: Sequence[str], select: str, *, rows: int, sequence: int) -> Iterator[Cell]:
    """
    Args:
        select: a regular expression, found in a cell's name.

    Raises:
        ValueError: none is chosen.
    """
    everything = [
        Cell(size, subject, checkpointing, rows, sequence)
        for size in sizes
        for subject in SUBJECTS
        for checkpointing in (False, True)
    ]
    try:
        chosen = [cell for cell in everything if re.search(select, cell.name)]
    except re.error as error:
        raise ValueError(f"--select {select!r} is no regular expression: {error}") from None
    if not chosen:
        raise ValueError(f"--select {select!r} is in no name such as {everything[0].name!r} or {everything[-1].name!r}")
    yield from chosen


def shape_of(size: str) -> Shape:
    """Of a model of LLAMAS, without a cache of keys and values, which only generation needs."""
    return LLAMAS[size] | {"use_cache": False}


def is_done(cell: Cell, results: Sequence[Mapping[str, Any]]) -> bool:
    """On this device."""
    facts = asdict(cell) | {"device": device_name()}
    return any(all(result.get(key) == value for key, value in facts.items()) for result in results)


def measure(cell: Cell, shape: Shape, *, repeats: int, limits: Sequence[int] = LIMITS) -> dict[str, Any]:
    """Figures of a cell; without those of memory on a CPU."""
    memory = device_memory()
    begin = seconds()
    trials = Trials(cell, shape, SUBJECTS[cell.subject], memory)
    try:
        figures = _figures(trials, repeats)
        found = _largest(trials, figures["peaks"], limits) if memory else None
    except torch.OutOfMemoryError as error:
        figures, found = {"not_measured": str(error).partition("\n")[0]}, None
    finally:
        trials.close()
    facts = asdict(cell) | {"device": device_name(), "shape": shape, "world_size": WORLD_SIZE, "rank": RANK}
    return facts | figures | {"largest": found, "took_seconds": seconds() - begin}


def _figures(trials: Trials, repeats: int) -> dict[str, Any]:
    """Of the cell's own micro-batch."""
    cell = trials.cell
    flops = cell.rows * trials.flops_of_a_row()
    trials.step(1)  # what is made once is there
    peaks = {rows: trials.peak_of(rows) for rows in (1, max(2, cell.rows))}
    times = [trials.step(cell.rows) for _ in range(repeats)]
    peak = peak_flops(device_name())
    return {
        "estimate": estimated(trials.rank),
        "flops": flops,
        "seconds": times,
        "tokens_per_second": cell.rows * cell.sequence / median(times),
        "mfu": flops / median(times) / peak if peak else None,
        "peaks": peaks,
    }


def _largest(trials: Trials, peaks: dict[int, int], limits: Sequence[int]) -> dict[str, Any]:
    """By limit in GB: rows, and seconds and peak of their step. None where the device has less memory than that."""
    found: dict[str, Any] = {}
    memory = trials.memory
    assert memory is not None
    for limit in (limit * GB for limit in limits):
        known: dict[int, dict[str, Any]] = {}

        def fits(rows: int, known: dict[int, dict[str, Any]] = known, limit: int = limit) -> bool:
            return trials.fits(rows, limit, known)

        key = str(limit // GB)
        if limit > memory.total():
            found[key] = None
            continue
        rows = largest(fits, guessed_rows(peaks, limit))
        found[key] = {"rows": rows} | known.get(rows, {})
    return found


def estimated(rank: Rank) -> dict[str, int] | None:
    """Bytes, as `sdp estimate` has them for a rank of the method, without activations; None for others."""
    if not isinstance(rank, EngineRank) or not hasattr(rank.engine, "plan"):
        return None
    setup = Setup(stage=1, precision=Precision.of("bf16"), bucket_elements=BUCKET)
    figures = estimate(rank.engine.plan, rank.engine.optimizer.model.tensors, setup)[RANK]
    return vars(figures) | {"state": figures.state}


class Trials:
    """Steps of one rank, which is built anew after one for which memory did not suffice.

    Args:
        build: the rank, from a shape.
        memory: of the device; None where nobody tells.
    """

    def __init__(self, cell: Cell, shape: Shape, build: Callable[[Shape], Rank], memory: DeviceMemory | None) -> None:
        self.cell, self.memory = cell, memory
        self._shape, self._build = shape, build
        self._rank: Rank | None = None

    @property
    def rank(self) -> Rank:
        if self._rank is None:
            self._rank = self._build(self._shape)
            if self.cell.checkpointing:
                self._checkpoint()
        return self._rank

    def _checkpoint(self) -> None:
        assert self._rank is not None
        self._rank.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self._rank = None
        collect()

    def step(self, rows: int) -> float:
        """Seconds."""
        tokens = torch.randint(0, self._shape["vocab_size"], (rows, self.cell.sequence), device=device())
        rank, begin = self.rank, seconds()
        rank.step(tokens)
        return seconds() - begin

    def peak_of(self, rows: int) -> int | None:
        """Bytes of a step; the second one, as moments are made in the first."""
        if self.memory is None:
            return None
        self.memory.reset()
        self.step(rows)
        return self.memory.peak()

    def flops_of_a_row(self) -> int:
        """Of forward and backward, without what activation checkpointing runs again."""
        if self.cell.checkpointing:
            self.rank.module.gradient_checkpointing_disable()
        with FlopCounter() as counter:
            self.step(1)
        if self.cell.checkpointing:
            self._checkpoint()
        return counter.total

    def fits(self, rows: int, limit: int, known: dict[int, dict[str, Any]]) -> bool:
        """Whether a step fits into `limit` bytes; one of a rank that has made a step before."""
        assert self.memory is not None
        if self._rank is None:
            self.step(1)
        try:
            with self.memory.limited(limit):
                self.memory.reset()
                self.step(rows)  # asks the driver for memory, which takes its time; the next step has it
                known[rows] = {"seconds": self.step(rows), "peak": self.memory.peak()}
                return True
        except torch.OutOfMemoryError:
            pass  # as long as the error is handled, it keeps what the step has made
        self.close()  # what was half done is undone with it
        return False
