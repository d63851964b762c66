"""docs/config.md is what its generator writes today: its tables cannot fall behind the fields and refusals."""

from __future__ import annotations

import runpy

from tests.helpers.repository import ROOT


def test_config_document_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "make_config.py"))
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == generator["document"](), (
        "run: python docs/make_config.py"
    )
