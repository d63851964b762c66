"""What ends a process, in words, as code at its end hears it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT

PROGRAM = """
import atexit, sys, threading
from sdp_deepspeed.distributed.exits import error_at_end, error_of_exit, remember_exits

class Watched:
    def __del__(self):
        print("unwinding:", error_of_exit())

def run():
    watched = Watched()
    {body}

atexit.register(lambda: print("end:", error_at_end()))
for _ in range(2):
    remember_exits()
run()
"""
CAUGHT = "try: sys.exit(3)\n    except SystemExit: pass\n    sys.exit({})"
THREAD = "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()"
HANDLED = "try: 1 / 0\n    except ZeroDivisionError: sys.exit(2)"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("sys.exit('no data')", 1, "sys.exit('no data')"),
        ("sys.exit()", 0, None),
        ("sys.exit(0)", 0, None),
        (HANDLED, 2, "ZeroDivisionError: division by zero"),
        (CAUGHT.format(0), 0, None),
        (THREAD, 0, None),
    ],
)
def test_the_error_of_an_exit_is_known_while_the_process_unwinds_and_at_its_end(
    body: str, code: int, said: str | None
) -> None:
    done = run(body)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [f"unwinding: {said}", f"end: {said}"]


def test_an_exception_that_nobody_caught_is_the_error() -> None:
    assert run("raise ArithmeticError('on', 'purpose')").stdout.startswith("end: ArithmeticError: ('on', 'purpose')\n")


def run(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
