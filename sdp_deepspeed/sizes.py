"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import argparse
import re

_MIB = 2**20
_UNITS = {1: "bytes", 10**3: "kB", 10**6: "MB", 10**9: "GB", 10**12: "TB"}


def byte_count(text: str) -> int:
    """An argument's type: the bytes of "5GB" or "200M" (powers of 1000), "2GiB" (of 1024), or a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    exponent = " KMGT".index((found[2] or " ").upper()) if found else 0
    count = int(float(found[1]) * (1024 if found[3] else 1000) ** exponent) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 200MB, got {text!r}")
    return count


def bytes_text(count: int) -> str:
    """Of files: "512 bytes", "5.00 GB"."""
    unit = max((unit for unit in _UNITS if unit <= count), default=1)
    return f"{count / unit:.{0 if unit == 1 else 2}f} {_UNITS[unit]}"


def mib_text(count: float) -> str:
    """Of memory and traffic, always in one unit, so that a column can be compared: "0.25 MiB"."""
    return f"{count / _MIB:.2f} MiB"
