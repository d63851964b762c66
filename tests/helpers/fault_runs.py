"""Starts a small run of two ranks again and again, kills ranks, and checks what each start resumes from."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.checkpointed_runs import names_in
from tests.helpers.fault_ranks import STYLES, Death, Start, log_path, run_rank

LAST_STEP = 8  # after it the run begins anew, in another style
PRELOAD = ["torch", "deepspeed", "transformers.models.llama.modeling_llama", "sdp_deepspeed"]

# Where a rank kills itself: words of the log, and what is done to files by rank 0 alone or by both.
BY_BOTH = ["read", "write", "bytes", "saved", "loaded", "step", "save"]
BY_RANK_0 = [
    "prepare",
    "checksums",
    "index",
    "rename",
    "latest",
    "rename latest",
    "sync",
    "remove",
    "set aside",
    "prune",
]
# Where the driver does, some time after the word.
TIMED = ["start", "load", "step", "save", "saved"]
OF_STYLE = {"set aside": ("two tags in turn", "one tag"), "prune": ("a tag per step",)}


@dataclass(frozen=True)
class Kill:
    """What ends a start.

    Args:
        victims: ranks; the first one dies first, the other right after it.
        place: see `Death`; with a delay a word of the log.
        count: at the how many-th time.
        delay: as a share of the time that the word usually takes; None: the rank kills itself, exactly there.
    """

    victims: tuple[int, ...]
    place: str
    count: int
    delay: float | None = None

    @staticmethod
    def draw(numbers: random.Random, style: str, size: int) -> Kill:
        first, second, *_ = numbers.sample(range(size), size)
        victims = numbers.choice([(0,), (first,), (second,), (first, second)])
        if numbers.random() < 0.35:
            place = numbers.choice(TIMED)
            count = 1 if place in ("start", "load") else numbers.randint(1, 3)
            return Kill(victims, place, count, numbers.random() * 1.2)
        places = [place for place in [*BY_BOTH, *BY_RANK_0] if style in OF_STYLE.get(place, STYLES)]
        place = numbers.choice(places)
        if place in BY_RANK_0 and victims[0]:
            victims = (0, *[victim for victim in victims[1:] if victim])
        return Kill(victims, place, numbers.randint(1, 6 if place in ("read", "write", "bytes", "remove") else 2))


@dataclass
class Outcome:
    """Of one start.

    Args:
        resumed: step that was loaded; None if it was killed before.
        killed_at: what the first victim was doing, as word of its log or as place; None if nobody was killed.
        survivor_seconds: from the kill to the end of the last other rank, by itself; None where all were killed.
        survivor_error: the last line that one of them wrote.
        problems: what must not be; empty if all is well.
    """

    style: str
    asynchronous: bool
    kill: Kill
    resumed: int | None = None
    at_least: int = 0
    killed_at: str | None = None
    survivor_seconds: float | None = None
    survivor_error: str | None = None
    problems: list[str] = field(default_factory=list)


class Faults:
    """A run that is killed again and again.

    Args:
        folder: empty; checkpoints and logs go there.
        size: ranks.
        seed: of all that is random here.
        limit: seconds that a start may take.
        style: the first one, a key of STYLES.
    """

    def __init__(
        self, folder: Path, *, seed: int, size: int = 2, limit: float = 240.0, style: str = "a tag per step"
    ) -> None:
        self._folder, self._limit, self._size = folder, limit, size
        self._numbers = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._style = style
        self._saved = 0  # the last step whose save has returned on all ranks
        self._starts = 0
        self._seconds = {"start": 1.0, "load": 0.1, "step": 0.1, "save": 0.2, "saved": 0.02}
        self._expected = self._undisturbed()

    def cycle(self, kill: Kill | None = None) -> Outcome:
        """Start, resume, train, kill."""
        kill = kill or Kill.draw(self._numbers, self._style, self._size)
        outcome = Outcome(self._style, self._starts % 2 == 1, kill, at_least=self._saved)
        start = self._next(outcome.style, asynchronous=outcome.asynchronous, kill=kill)
        self._run(start, outcome)
        logs = [_read(start, rank) for rank in range(self._size)]
        self._check(outcome, logs)
        if self._saved == LAST_STEP and outcome.killed_at is None:
            self._begin_anew()
        if not outcome.problems:
            shutil.rmtree(start.folder)
        return outcome

    def _undisturbed(self) -> list[list[str]]:
        """Digests per rank by step, from 0, of a run that neither saves nor stops."""
        start = self._next(None)
        outcome = Outcome("", asynchronous=False, kill=Kill((), "", 0))
        self._run(start, outcome)
        assert not outcome.problems, outcome
        logs = [_read(start, rank) for rank in range(self._size)]
        return [[line[3] for line in log if line[1] in ("loaded", "state")] for log in logs]

    def _begin_anew(self) -> None:
        shutil.rmtree(self._folder / "checkpoints")
        self._saved = 0
        styles = list(STYLES)
        self._style = styles[(styles.index(self._style) + 1) % len(styles)]

    def _next(self, style: str | None, *, asynchronous: bool = False, kill: Kill | None = None) -> Start:
        self._starts += 1
        folder = self._folder / f"start_{self._starts}"
        folder.mkdir(parents=True)
        exact = kill is not None and kill.victims and kill.delay is None
        dies = (kill.victims[0], Death(kill.place, kill.count)) if kill is not None and exact else None
        steps = LAST_STEP if style is None else 4
        return Start(folder, style, asynchronous, steps, LAST_STEP, dies, self._limit)

    def _run(self, start: Start, outcome: Outcome) -> None:
        ranks = [self._context.Process(target=run_rank, args=(rank, self._size, start)) for rank in range(self._size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + self._limit
        try:
            self._strike(start, outcome, ranks, deadline)
            for rank, process in enumerate(ranks):
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    outcome.problems.append(f"rank {rank} hangs: {_errors(start, rank)}")
        finally:
            for process in ranks:
                process.kill()
                process.join()
        self._judge_ends(start, outcome, [process.exitcode for process in ranks])

    def _strike(self, start: Start, outcome: Outcome, ranks: list[Any], deadline: float) -> None:
        """Wait for the first death, which may be ours to bring, and see to the rest."""
        kill = outcome.kill
        if not kill.victims:
            return
        first = ranks[kill.victims[0]]
        due: float | None = None
        while all(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if kill.delay is not None and due is None:
                due = self._due(_read(start, kill.victims[0]), kill)
            if due is not None and time.monotonic() >= due:
                os.kill(first.pid, signal.SIGKILL)
                first.join()
            time.sleep(0.001)
        if any(process.exitcode == -signal.SIGKILL for process in ranks):
            self._end_others(start, outcome, ranks)

    def _due(self, log: list[list[str]], kill: Kill) -> float | None:
        lines = [line for line in log if line[1] == kill.place]
        if kill.delay is None or len(lines) < kill.count:
            return None
        return float(lines[kill.count - 1][0]) + kill.delay * self._seconds[kill.place]

    def _end_others(self, start: Start, outcome: Outcome, ranks: list[Any]) -> None:
        """A second victim is killed at once, and so are ranks that wait for the first to come up; others must end."""
        first, *second = outcome.kill.victims
        others = [rank for rank in range(self._size) if rank != first]
        words = [line[1] for line in _read(start, first)]
        outcome.killed_at = outcome.kill.place if outcome.kill.delay is None else f"during {words[-1]}"
        for rank in others if "load" not in words else second:
            ranks[rank].kill()
            ranks[rank].join()
        since = time.monotonic()
        for rank in [rank for rank in others if ranks[rank].exitcode != -signal.SIGKILL]:
            ranks[rank].join(max(0.0, since + self._limit / 2 - time.monotonic()))
            outcome.survivor_seconds = round(time.monotonic() - since, 3)
            outcome.survivor_error = self._last_line(start, rank)
            if ranks[rank].exitcode is None:
                outcome.problems.append(f"rank {rank} waits for a dead one: {_errors(start, rank)}")
            elif ranks[rank].exitcode == 0 and _read(start, rank)[-1][1] != "end":
                outcome.problems.append(f"rank {rank} ended as if nothing was wrong")

    def _last_line(self, start: Start, rank: int) -> str:
        """The last error that a rank wrote, without addresses and paths."""
        lines = [line for line in _errors(start, rank).splitlines() if "Error: " in line]
        last = (lines or [""])[-1].replace(str(self._folder), "")
        return re.sub(r" ?\[[^]]*\](:\d+)?", "", last).partition(". This")[0]

    def _judge_ends(self, start: Start, outcome: Outcome, codes: list[int | None]) -> None:
        if outcome.killed_at is None and codes != [0] * self._size:
            outcome.problems.append(
                f"ended with {codes}: {' '.join(_errors(start, rank) for rank in range(self._size))}"
            )

    def _check(self, outcome: Outcome, logs: list[list[list[str]]]) -> None:
        """What was loaded, against what had been saved and against the run that was never stopped."""
        for rank, log in enumerate(logs):
            for line in (line for line in log if line[1] == "loaded"):
                outcome.resumed = int(line[2])
                if line[3] != self._expected[rank][outcome.resumed]:
                    outcome.problems.append(f"rank {rank} resumed step {line[2]} with another state")
                if outcome.resumed < self._saved:
                    outcome.problems.append(f"rank {rank} resumed step {line[2]}, {self._saved} had been saved")
        saved = [max((int(line[2]) for line in log if line[1] == "saved"), default=0) for log in logs]
        self._saved = max(self._saved, min(saved), outcome.resumed or 0)  # what was loaded once stays, too
        checkpoints = self._folder / "checkpoints"
        names = names_in(checkpoints) if checkpoints.is_dir() else []
        if len(names) > 6:  # two tags and a third, which is not yet pruned; `latest`; what was half made or removed
            outcome.problems.append(f"leftovers: {names}")
        self._measure(logs[0])

    def _measure(self, log: list[list[str]]) -> None:
        """How long each word usually takes."""
        for line, following in itertools.pairwise(log):
            if line[1] in self._seconds and following[1] != "dies":
                taken = float(following[0]) - float(line[0])
                self._seconds[line[1]] = 0.8 * self._seconds[line[1]] + 0.2 * taken


def _read(start: Start, rank: int) -> list[list[str]]:
    """Lines of a rank's log as words: time, word, more."""
    path = log_path(start.folder, rank)
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _errors(start: Start, rank: int) -> str:
    path = start.folder / f"rank_{rank}.err"
    return path.read_text()[-2000:] if path.exists() else ""


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts over all starts, and each of them."""
    killed = [outcome for outcome in outcomes if outcome.killed_at is not None]
    waits = [outcome.survivor_seconds for outcome in killed if outcome.survivor_seconds is not None]
    by_place: dict[str, int] = {}
    for outcome in killed:
        assert outcome.killed_at is not None
        by_place[outcome.killed_at] = by_place.get(outcome.killed_at, 0) + 1
    return {
        "starts": len(outcomes),
        "kills": len(killed),
        "ranks_killed": sum(len(outcome.kill.victims) for outcome in killed),
        "kills_by_place": dict(sorted(by_place.items())),
        "kills_by_style": {style: sum(o.style == style for o in killed) for style in STYLES},
        "kills_while_saving_behind": sum(outcome.asynchronous for outcome in killed),
        "resumed_and_compared": sum(outcome.resumed is not None for outcome in outcomes),
        "problems": [problem for outcome in outcomes for problem in outcome.problems],
        "slowest_survivor_seconds": max(waits, default=None),
        "survivor_errors": sorted({o.survivor_error for o in killed if o.survivor_error})[:20],
        "each": [asdict(outcome) for outcome in outcomes],
    }
