"""Whether an error ends this process, and which: for who tells it to other ranks when the process ends.

Python keeps an exception that nobody caught, but not the `SystemExit` of `sys.exit`: at the end of a process nothing
says any more that its exit code is to be 3. So `sys.exit` leaves behind here what it was called with. One that was
caught, in a process that goes on and then ends without another `sys.exit`, cannot be told from one that was not; nor
does `raise SystemExit(3)` come by here.
"""

from __future__ import annotations

import sys
import threading
from functools import cache, wraps

_said: list[str | None] = []  # by the last `sys.exit` of the main thread; None where that was no error


@cache
def remember_exits() -> None:
    """From now on; once in a process."""
    end = sys.exit

    @wraps(end)
    def remember_and_end(status: object = None, /) -> None:
        if threading.current_thread() is threading.main_thread():  # in another it ends that thread alone
            _said[:] = [_words(status, sys.exc_info()[1])]
        end(status)  # type: ignore[arg-type]

    sys.exit = remember_and_end  # type: ignore[assignment]


def error_of_exit() -> str | None:
    """That of the last `sys.exit`, in words; also while the process still unwinds."""
    return _said[0] if _said else None


def error_at_end() -> str | None:
    """That ends this process, which is at its end, in words; None if it ends well."""
    is_interactive = hasattr(sys, "ps1")  # where the last error may be long past, and has ended nothing
    error = None if is_interactive else getattr(sys, "last_value", None)
    return error_of_exit() if error is None else _in_a_line(error)


def _words(status: object, reason: BaseException | None) -> str | None:
    """Of `sys.exit(status)`, where this exception was handled."""
    if status in (None, 0):
        return None
    return f"sys.exit({status!r})" if reason is None else _in_a_line(reason)


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]
