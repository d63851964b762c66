"""docs/results.md and the figures of docs/ are current with the raw JSON; tables are made from it alone."""

from __future__ import annotations

from benchmarks import tables
from tests.helpers.repository import ROOT


def test_the_documents_are_current() -> None:
    """After a change of raw figures: python benchmarks/tables.py."""
    made = tables.outputs(ROOT)
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python benchmarks/tables.py"
