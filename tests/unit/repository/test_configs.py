"""The JSON files that the project ships are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_are_accepted(path: Path) -> None:
    from sdp_deepspeed.config import parse
    from sdp_deepspeed.support.refusals import refuse_unsupported

    config = json.loads(path.read_text())
    block = parse(config)
    assert block is not None
    refuse_unsupported(block, config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "data").glob("*.json")), ids=lambda path: path.stem)
def test_data_files_are_accepted(path: Path) -> None:
    from sdp_deepspeed.data import DataConfig

    assert DataConfig.from_dict(json.loads(path.read_text()))
