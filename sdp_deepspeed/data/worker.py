"""The program that tokenizes parts: tasks come through stdin, results go through stdout, until stdin ends."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass

from sdp_deepspeed.data.lifeline import end_with_parent
from sdp_deepspeed.data.tokenize_part import PartTokenizer
from sdp_deepspeed.data.tokenizer import SavedTokenizer


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is told first."""

    tokenizer: SavedTokenizer
    validation_fraction: float

    def tokenizing(self) -> PartTokenizer:
        """What runs tasks."""
        saved = self.tokenizer
        return PartTokenizer(saved.load(), saved.end_of_document, saved.vocab_size, self.validation_fraction)


def main() -> int:
    """Each answer is a result, or the error of the task as it was raised."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between
    tasks = sys.stdin.buffer
    with suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):  # the one that started it has ended
        setup: WorkerSetup = pickle.load(tasks)
        tokenizing: PartTokenizer | None = None
        while True:
            task = pickle.load(tasks)
            try:
                tokenizing = tokenizing or setup.tokenizing()
                answer: object = tokenizing.run(task)
            except Exception as error:
                answer = _portable(error)
            pickle.dump(answer, answers)
            answers.flush()
    return 0


def _portable(error: Exception) -> Exception:
    """Errors of libraries may not be what another process can make again."""
    kinds = (ValueError, ConnectionError, OSError)
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    return kind(str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
