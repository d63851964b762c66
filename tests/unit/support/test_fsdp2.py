"""FSDP2's half of the support table; tests/ranks/support starts what it says, or other tests do."""

from __future__ import annotations

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.block import BLOCK
from sdp_deepspeed.support.fsdp2 import FSDP2_TABLE, refused_of_block
from sdp_deepspeed.support.rows import Row
from tests.helpers.fsdp2_examples import ELSEWHERE, REFUSED, WORKS, example_of
from tests.helpers.repository import TESTS
from tests.helpers.support_examples import ids
from tests.unit.support.test_refusals import parsed

OF_BLOCK = [row for row in (*WORKS, *REFUSED) if row.path.startswith(f"{KEY}.") and "schedule" not in row.path]


def test_both_hosts_decide_on_every_key_of_the_block() -> None:
    assert {row.what for row in BLOCK if row.path} <= {row.what for row in FSDP2_TABLE}
    assert len({row.what for row in FSDP2_TABLE}) == len(FSDP2_TABLE)
    assert all(row.note for row in FSDP2_TABLE if row.state != "works")
    assert {row.what for row in WORKS} >= {"forward regime", "block strategy", "neuron strategy", "strategy by part"}


@pytest.mark.parametrize("row", OF_BLOCK, ids=ids(OF_BLOCK))
def test_what_the_block_asks_for_is_refused_by_its_row_alone(row: Row) -> None:
    block = example_of(row).block
    holders = {} if {"coverage", "holders"} & block.keys() else {"holders": 1}
    found = list(refused_of_block(parsed({KEY: {**holders, **block}})))
    assert (row in [refused for refused, _ in found]) == (row.state == "refused")
    assert row.state == "refused" or not found


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_started_elsewhere_is_there(what: str) -> None:
    file, check = ELSEWHERE[what]
    assert what in {row.what for row in WORKS}
    text = (TESTS / file).read_text(encoding="utf-8")
    assert f"def {check}(" in text
    assert text.count(check) > 1, "a check that nothing runs"
