"""A rank is killed at any moment of an operation: the others end with an error, and the newest checkpoint is whole."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.kills import KINDS, OPERATIONS, Death, Start, run_rank
from tests.helpers.ranks import forkserver_context

pytestmark = pytest.mark.slow

KILLS = 13  # of each run; with two seeds 208 on two and four ranks, and 26 of exports by one process
SIZES = {"offline_export": (1,)}  # all others: 2 and 4 ranks
HANGS = 1200.0  # seconds after which a start hangs: many times what ranks wait for each other
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)


class Run:
    """A run that is started, killed in the operation, and started again, which checks what it loads.

    Args:
        folder: empty.
        seed: of all that is random here.
    """

    def __init__(self, folder: Path, operation: str, size: int, seed: int) -> None:
        self._root, self._operation, self._size = folder, operation, size
        self._numbers = random.Random(f"{operation} {size} {seed}")
        self._context = forkserver_context()
        self._starts = 0
        self._resumes: tuple[int, ...] = (0,)  # what the next start may load
        self._counts: list[dict[str, int]] = []  # of each rank, in an operation that nobody disturbed
        (folder / "exports").mkdir()

    def undisturbed(self) -> None:
        folder = self._start(None)
        self._counts = [json.loads((folder / f"counts_{rank}.json").read_text()) for rank in range(self._size)]

    def killed(self) -> str:
        """Returns what the rank was about to do."""
        rank = self._numbers.randrange(self._size)
        kind = self._numbers.choice([kind for kind in KINDS if self._counts[rank].get(kind)])
        death = Death(rank, kind, self._numbers.randint(1, self._counts[rank][kind]))
        died = self._start(death) / "died"
        where = died.read_text() if died.exists() else f"byte {death.number} of a file"
        return f"rank {rank} of {self._size} died in {self._operation}, {kind} {death.number}: {where}"

    def _start(self, death: Death | None) -> Path:
        """Returns its folder."""
        self._starts += 1
        folder = self._root / f"start_{self._starts}"
        folder.mkdir()
        tag = self._numbers.choice([f"step_{self._starts}", "one", "two"])
        is_behind = self._numbers.random() < 0.5
        start = Start(self._root, folder, self._operation, tag, is_behind, self._resumes, death)
        codes = dict(enumerate(self._codes(start)))
        texts = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("rank_*.err")))
        if death is None:
            assert set(codes.values()) == {0}, f"{start} ended with {codes}:\n{texts}"
        else:
            assert codes.pop(death.rank) in KILLED, f"{start} ended with {codes}:\n{texts}"
            assert all(code == 1 for code in codes.values()), f"{start}: others ended with {codes}:\n{texts}"
        step = int((folder / "step").read_text())
        is_torn = self._operation == "save" and death is not None
        self._resumes = (step - 1, step) if is_torn else (step,)
        return folder

    def _codes(self, start: Start) -> list[int | None]:
        """Exit codes of all ranks; None for one that hangs."""
        ranks = [self._context.Process(target=run_rank, args=(rank, self._size, start)) for rank in range(self._size)]
        end = time.monotonic() + HANGS
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            codes = [process.exitcode for process in ranks]
            for process in (process for process in ranks if process.is_alive()):
                os.kill(process.pid, signal.SIGUSR1)  # where it hangs
                process.join(1)
            return codes
        finally:
            for process in ranks:
                process.kill()
                process.join()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("operation", "size"), [(name, size) for name in OPERATIONS for size in SIZES.get(name, (2, 4))]
)
def test_a_rank_is_killed(operation: str, size: int, seed: int, tmp_path: Path) -> None:
    run = Run(tmp_path, operation, size, seed)
    run.undisturbed()
    for _ in range(KILLS):
        print(run.killed())
    run.undisturbed()
