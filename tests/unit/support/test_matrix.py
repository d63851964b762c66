"""The matrix that people read is the table that start-up refuses from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.support.combinations import count_combinations
from sdp_deepspeed.support.fsdp2 import FSDP2_TABLE
from sdp_deepspeed.support.matrix import BEGIN, END, markdown, write_matrix
from sdp_deepspeed.support.table import TABLE
from tests.helpers.repository import PACKAGE


def test_matrix_lists_all_rows_and_counts() -> None:
    counted = count_combinations()
    rows, combinations = markdown().split("\n\n", 1)
    assert len(rows.split("\n")) == len({row.what for row in (*TABLE, *FSDP2_TABLE)}) + 2
    assert all(f"| {row.what} | " in rows for row in TABLE)
    num_works, num_hints = (sum(row.state == state for row in TABLE) for state in ("works", "no effect"))
    assert f"DeepSpeed: {num_works} of {len(TABLE)} rows work, {num_hints} are hints" in combinations
    assert f"FSDP2: {sum(row.state == 'works' for row in FSDP2_TABLE)} of {len(FSDP2_TABLE)} rows work" in combinations
    share = (
        f"{counted.num_allowed:,} of {counted.num_combinations:,} combinations (regime x strategy x stage x precision x"
    )
    assert share in combinations
    assert f"are allowed ({100 * counted.num_allowed / counted.num_combinations:.0f}%)" in combinations
    for row, count in counted.refused_by:
        assert f"| {row.what} | {count:,} | {row.note} |" in combinations


def test_the_readme_beside_the_table_has_it() -> None:
    text = (PACKAGE / "support" / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{markdown()}\n{END}\n" in text, "run: sdp support sdp_deepspeed/support/README.md"


@pytest.mark.parametrize("old", ["", "\n", "old\n\nold\n"])
def test_matrix_is_written_between_its_markers(old: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\n{old}{END}\nafter\n")
    for _ in range(2):
        write_matrix(path)
        assert path.read_text() == f"before\n{BEGIN}\n{markdown()}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n" * 2])
def test_a_file_without_its_markers_once_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"README\.md needs a line <!-- matrix --> and a line"):
        write_matrix(path)
    assert path.read_text() == text
