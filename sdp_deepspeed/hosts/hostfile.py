"""The hostfile of DeepSpeed's launcher: a host and its number of ranks in a line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sdp_deepspeed.atomic_files import regular

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[1-9]\d{0,4})(\s+#.*)?")


@dataclass(frozen=True)
class Host:
    """A host as the hostfile names it.

    Args:
        slots: ranks that it is to run.
    """

    name: str
    slots: int


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts in the order of their ranks.

    Raises:
        ValueError: the file cannot be read, or a line of it.
    """
    try:
        lines = regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"hostfile: cannot read {path}: {reason}") from None
    hosts: list[Host] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["host"].startswith("-"):
            raise ValueError(
                f'hostfile: {path}:{number}: got {line!r}, expected a host and its slots: "node-1 slots=8"'
            )
        if match["host"] in {host.name for host in hosts}:
            raise ValueError(
                f"hostfile: {path}:{number}: {match['host']} is there twice: give it one line with all slots"
            )
        hosts.append(Host(match["host"], int(match["slots"])))
    if not hosts:
        raise ValueError(f'hostfile: {path} names no host: expected lines such as "node-1 slots=8"')
    return tuple(hosts)
