"""A probe on another host, over ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

_CONNECT_SECONDS = 10
_LEAVING_SECONDS = 5.0


class HostError(Exception):
    """A host cannot be asked, or cannot answer; says why, not which host."""


class Remote:
    """A host that answers questions while the block runs.

    Args:
        ssh: the command with its options, the host's name last.
    """

    def __init__(self, ssh: Sequence[str]) -> None:
        self._ssh = ssh
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None

    def __enter__(self) -> Remote:
        # A file, as a pipe that nobody reads would fill up; closed when this is.
        self._said = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [*self._ssh, probe_command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            encoding="utf-8",
            errors="replace",
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._said is not None:
            self._said.close()

    def ask(self, what: str, *, seconds: float = 60.0, **arguments: Any) -> Any:
        """A question of the probe.

        Raises:
            HostError: it has no answer, or none within so many seconds.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([what, arguments]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it ended before the question
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise HostError(self._why_it_ended(what, seconds))
        outcome, value = json.loads(line)
        if outcome == "error":
            raise HostError(str(value))
        return value

    def _why_it_ended(self, what: str, seconds: float) -> str:
        assert self._process is not None
        assert self._said is not None
        code = self._process.wait()
        self._said.seek(0)
        said = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        last = said[-1] if said else f"exit code {code}"
        if code < 0:
            return f"no answer ({what}) within {seconds:.0f} seconds"
        if code == 255:  # ssh's own
            return f"not reachable by ssh: {last}"
        return f"{shlex.quote(sys.executable)} with sdp_deepspeed does not run there, in {os.getcwd()}: {last}"


def ssh_command(host: str, port: int | None) -> list[str]:
    """That asks for no password, and gives up soon."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    return ["ssh", *options, *([] if port is None else ["-p", str(port)]), host]


def probe_command() -> str:
    """For a shell there: the same Python, folder and search path as here, as DeepSpeed's launcher does it."""
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-u", "-m", "sdp_deepspeed.hosts.probe"]
    return f"cd {shlex.quote(os.getcwd())} && exec env PYTHONPATH={shlex.quote(path)} {shlex.join(command)}"
