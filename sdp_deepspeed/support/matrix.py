"""The support table as the matrix that people read, in this folder's README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, write_text
from sdp_deepspeed.support.combinations import AXES, count_combinations
from sdp_deepspeed.support.table import TABLE

BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"


def markdown() -> str:
    """Rows, axes, and what is refused of their combinations."""
    rows = [(row.what, f"`{row.path}`" if row.path else "", row.state, row.note) for row in TABLE]
    num_works, num_hints = (sum(row.state == state for row in TABLE) for state in ("works", "no effect"))
    counts = count_combinations()
    words = " x ".join(name.replace("_", " ") for name in AXES)
    axes = [(name.replace("_", " "), ", ".join(_word(value) for value in values)) for name, values in AXES.items()]
    refused = [(row.what, f"{count:,}", row.note) for row, count in counts.refused_by]
    return "\n".join(
        [
            *_table(("what", "JSON path", "state", "why, or what to do"), rows),
            f"\n{num_works} of {len(TABLE)} rows work, {num_hints} are hints without effect; every other is refused at "
            "start.",
            f"\n{counts.num_allowed:,} of {counts.num_combinations:,} combinations ({words}) are allowed "
            f"({counts.num_allowed / counts.num_combinations:.0%}):\n",
            *_table(("axis", "values"), axes),
            "\nThe others are refused by these rows, some by several:\n",
            *_table(("what", "combinations", "why, or what to do"), refused),
        ]
    )


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
