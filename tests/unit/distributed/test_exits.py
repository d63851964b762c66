"""What ends a process, in words, as code at its end hears it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sdp_deepspeed.distributed import exits
from tests.helpers.last_acts import of_ranks
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, sys, threading
from sdp_deepspeed.distributed.exits import error_at_end, error_of_exit, go_on, remember_exits

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
GONE_ON = "try: sys.exit(3)\n    except SystemExit: pass\n    go_on()"
INTERACTIVE = "sys.ps1 = 'In : '\n    sys.exit(3)"
ODD = "import numpy\n    sys.exit(numpy.zeros(2))"
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
        (GONE_ON, 0, None),
        (INTERACTIVE, 3, None),
        (ODD, 1, "sys.exit(array([0., 0.]))"),
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


def test_who_trains_on_has_caught_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    [own] = of_ranks(1)
    monkeypatch.setattr(exits, "_said", ["sys.exit(3)"])
    own.note("began its step")
    assert exits.error_of_exit() == "sys.exit(3)", "an exit may end a step"
    own.launch()
    assert exits.error_of_exit() is None


def run(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
