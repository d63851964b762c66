"""Parts of a corpus and their order in the stream."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data import parts
from sdp_deepspeed.data.files import TextRows
from sdp_deepspeed.data.parts import capped, grouped, in_stream_order
from tests.helpers.properties import examples


@given(st.integers(0, 300))
@examples(40)
def test_the_stream_has_every_part_once_and_is_mixed(count: int) -> None:
    numbers = [TextRows("text", (), number, "text", None) for number in range(count)]
    order = [part.size for part in in_stream_order(numbers)]
    assert sorted(order) == list(range(count))
    assert count < 10 or order != sorted(order)
    assert order == [part.size for part in in_stream_order(numbers)]


def test_small_files_together_and_large_ones_alone(tmp_path: Path) -> None:
    sizes = [10, parts.PART_BYTES, 10, 10, parts.PART_BYTES - 20, 5]
    paths = [tmp_path / str(number) for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    found = list(grouped(paths))
    assert [path for group, _ in found for path in group] == paths
    assert [size for _, size in found] == [parts.PART_BYTES + 10, parts.PART_BYTES, 5]


def test_the_cap_ends_before_the_document_that_would_exceed_it() -> None:
    documents = ["ab", "é", "cd", "e"]
    assert list(capped(documents, 4)) == ["ab", "é"]
    assert list(capped(documents, 5)) == ["ab", "é"]
    assert list(capped(documents, 6)) == ["ab", "é", "cd"]
    assert list(capped(documents, None)) == documents
