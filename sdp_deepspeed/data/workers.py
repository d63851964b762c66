"""Worker processes from the side of whoever needs their work: results in the order of the tasks, whoever is faster."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

from sdp_deepspeed.data import lifeline
from sdp_deepspeed.data.tokenize_part import PartTokenizer, Task, TokenizedPart
from sdp_deepspeed.data.worker import WorkerSetup

# One thread each: the tokenizer's own threads would wait for the one that turns its ids into an array.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
_SECONDS_TO_SEE_AN_END = 2.0
# A run lasts days, in which a network fails now and then.
_SECONDS_BEFORE_TRIES = (2.0, 10.0, 60.0)
log = logging.getLogger(__name__)


def num_cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkQueue(Protocol):
    """Tasks in, results out in their order."""

    @property
    def has_room(self) -> bool: ...

    def submit(self, task: Task) -> None: ...

    def next_result(self, timeout: float | None = None) -> TokenizedPart: ...


class InThisProcess:
    """For so little text that no process is worth its start: a task is done when its result is asked for."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._tasks: deque[Task] = deque()
        self._tokenizing: PartTokenizer | None = None

    @property
    def has_room(self) -> bool:
        return not self._tasks

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def next_result(self, timeout: float | None = None) -> TokenizedPart:
        del timeout
        self._tokenizing = self._tokenizing or self._setup.tokenizing()
        tokenizing, task = self._tokenizing, self._tasks.popleft()
        answer = _patiently(lambda: _answer(tokenizing, task))
        if isinstance(answer, Exception):
            raise answer
        return answer


class Workers:
    """Processes of `sdp_deepspeed.data.worker`, each with a thread here that hands it tasks.

    Args:
        setup: for all of them.
        num_workers: processes.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._tasks: SimpleQueue[tuple[Task, Future[TokenizedPart]] | None] = SimpleQueue()
        self._pending: deque[Future[TokenizedPart]] = deque()
        self._processes: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[Workers]:
        """Started, and ended with the block."""
        for _ in range(self._num_workers):
            process = lifeline.start("sdp_deepspeed.data.worker", environment=_ENVIRONMENT)
            self._processes.append(process)
            threading.Thread(target=self._serve, args=(process,), name="tokenize", daemon=True).start()
        try:
            yield self
        finally:
            for _ in self._processes:
                self._tasks.put(None)
            for process in self._processes:
                lifeline.stop(process)

    @property
    def num_pending(self) -> int:
        """Tasks whose results were not taken yet."""
        return len(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether another task keeps a worker busy; more would only be staged far ahead of their turn."""
        return self.num_pending < 3 * self._num_workers

    def submit(self, task: Task) -> None:
        """Results come in the order of these calls."""
        future: Future[TokenizedPart] = Future()
        self._pending.append(future)
        self._tasks.put((task, future))

    def next_result(self, timeout: float | None = None) -> TokenizedPart:
        """Of the oldest task. TimeoutError if it is not there in time.

        Raises:
            ValueError, OSError, RuntimeError: of that task.
        """
        result = self._pending[0].result(timeout)
        self._pending.popleft()
        return result

    def _serve(self, process: Any) -> None:
        told = False
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                if not told:
                    pickle.dump(self._setup, process.stdin)
                    told = True
                answer = _patiently(lambda: _ask(process, task))  # noqa: B023  it is called here
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                future.set_exception(RuntimeError(_how_it_ended(process)))
                return
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _ask(process: Any, task: Task) -> Any:
    """A result, or the error of the task."""
    pickle.dump(task, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _answer(tokenizing: PartTokenizer, task: Task) -> TokenizedPart | Exception:
    try:
        return tokenizing.run(task)
    except ConnectionError as error:
        return error


def _patiently(ask: Callable[[], Any]) -> Any:
    """The answer, asked for again while the network fails."""
    for seconds in _SECONDS_BEFORE_TRIES:
        answer = ask()
        if not isinstance(answer, ConnectionError):
            return answer
        log.warning("a part is read again in %.0f s: %s", seconds, answer)
        time.sleep(seconds)
    return ask()


def _how_it_ended(process: Any) -> str:
    try:
        code = process.wait(_SECONDS_TO_SEE_AN_END)
    except subprocess.TimeoutExpired:  # it lives, but what it said was no answer
        code = None
    memory = ", as the system does where memory runs out: give fewer workers" if code == -9 else ""
    return f"a process that tokenizes ended (exit code {code}){memory}"
