"""The support table as the matrix that people read, in this folder's README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.support.combinations import AXES, count_combinations
from sdp_deepspeed.support.fsdp2 import FSDP2_TABLE
from sdp_deepspeed.support.rows import Row
from sdp_deepspeed.support.table import TABLE

BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
_NONE = "–"  # of a host that has no such thing


def markdown() -> str:
    """Rows of both hosts, axes, and what is refused of their combinations."""
    num_works, num_hints = (sum(row.state == state for row in TABLE) for state in ("works", "no effect"))
    num_sharded = sum(row.state == "works" for row in FSDP2_TABLE)
    counts = count_combinations()
    words = " x ".join(name.replace("_", " ") for name in AXES)
    axes = [(name.replace("_", " "), ", ".join(_word(value) for value in values)) for name, values in AXES.items()]
    refused = [(row.what, f"{count:,}", row.note) for row, count in counts.refused_by]
    return "\n".join(
        [
            *_table(("what", "asked for by", "DeepSpeed", "FSDP2", "why, or what to do"), host_rows()),
            f"\nDeepSpeed: {num_works} of {len(TABLE)} rows work, {num_hints} are hints without effect; every other is "
            f"refused at start. FSDP2: {num_sharded} of {len(FSDP2_TABLE)} rows work.",
            f"\nDeepSpeed: {counts.num_allowed:,} of {counts.num_combinations:,} combinations ({words}) are allowed "
            f"({counts.num_allowed / counts.num_combinations:.0%}):\n",
            *_table(("axis", "values"), axes),
            "\nThe others are refused by these rows, some by several:\n",
            *_table(("what", "combinations", "why, or what to do"), refused),
        ]
    )


def host_rows() -> list[tuple[str, str, str, str, str]]:
    """What each host says, and why; rows of FSDP2 alone come last."""
    sharded = {row.what: row for row in FSDP2_TABLE}
    both = [(row, sharded.pop(row.what, None)) for row in TABLE]
    return [_line(row.what, row, other) for row, other in both] + [
        _line(row.what, None, row) for row in sharded.values()
    ]


def _line(what: str, deepspeed: Row | None, sharded: Row | None) -> tuple[str, str, str, str, str]:
    paths = dict.fromkeys(f"`{row.path}`" for row in (deepspeed, sharded) if row is not None and row.path)
    states = [_NONE if row is None else row.state for row in (deepspeed, sharded)]
    notes = [] if deepspeed is None else [deepspeed.note]
    if sharded is not None and sharded.note not in notes:
        notes.append(sharded.note if deepspeed is None else f"FSDP2: {sharded.note}")
    return what, ", ".join(paths), states[0], states[1], "; ".join(filter(None, notes))


def write_matrix(path: Path) -> None:
    """Replace what stands between the markers of a file.

    Raises:
        ValueError: the file does not have each marker once.
    """
    text = regular(path).read_text(encoding="utf-8")
    parts = re.split(rf"(?<={BEGIN}\n).*?(?={END}\n)", text, flags=re.DOTALL)
    if len(parts) != 2:
        raise ValueError(f"{path} needs a line {BEGIN} and a line {END} once, to write the matrix between them")
    before, after = parts
    write_text(path, f"{before}{markdown()}\n{after}")


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]
