"""The README says what the code says."""

from __future__ import annotations

import re

from sdp_deepspeed.config import SubnetworkConfig
from tests.helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"(?:launch|configs|sdp_deepspeed|benchmarks)/[\w/.]+\.(?:py|sh|json|md)", README):
        assert (ROOT / path).is_file(), path


def test_every_key_of_the_block_that_is_listed_exists() -> None:
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert keys <= SubnetworkConfig.model_fields.keys()
