"""The index: chunks cover each element of each tensor exactly once, and what is trained is of floating point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.storage.index import covers_once, parse
from tests.helpers.properties import examples

Boxes = list[tuple[Sequence[int], Sequence[int]]]


def cut_at_random(offsets: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject) -> Iterator[Any]:
    """Boxes that cover a box, cut again and again."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or data.draw(st.integers(0, 2)) == 0:
        yield offsets, sizes
        return
    dim = data.draw(st.sampled_from(dims))
    first = data.draw(st.integers(1, sizes[dim] - 1))
    for start, length in ((0, first), (first, sizes[dim] - first)):
        yield from cut_at_random(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
            (*sizes[:dim], length, *sizes[dim + 1 :]),
            data,
        )


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@examples(100)
def test_any_cutting_covers_once_and_no_change_of_it_does(shape: list[int], data: st.DataObject) -> None:
    boxes: Boxes = list(cut_at_random((0,) * len(shape), tuple(shape), data))
    assert covers_once(shape, boxes)
    assert not covers_once(shape, boxes[1:])
    assert not covers_once(shape, [*boxes, boxes[0]])
    if shape:
        moved = tuple(offset + 1 for offset in boxes[0][0]), boxes[0][1]
        assert not covers_once(shape, [moved, *boxes[1:]])


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2), max_size=4))
@examples(200)
def test_it_is_what_counting_finds(boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    counts = np.zeros((5, 5), dtype=int)
    for (top, height), (left, width) in boxes:
        counts[top : top + height, left : left + width] += 1
    expected = np.zeros((5, 5), dtype=int)
    expected[:2, :2] = 1
    split: Boxes = [((top, left), (height, width)) for (top, height), (left, width) in boxes]
    assert covers_once((2, 2), split) == bool((counts == expected).all())


def test_empty_tensors_and_numbers_of_dims() -> None:
    assert covers_once((), [((), ())])
    assert not covers_once((), [])
    assert covers_once((0, 3), [])
    assert not covers_once((2,), [((0, 0), (2, 1))])
    corners: Boxes = [(offsets, (1,) * 9) for offsets in product((0, 1), repeat=9)]
    assert not covers_once((2,) * 9, corners)  # more than any tensor is cut along: 2 ** dims corners each


def entry(**changes: Any) -> dict[str, Any]:
    chunks = [{"offsets": [0, start], "sizes": [2, 2], "file": "a"} for start in (0, 2)]
    return {"dtype": "F32", "shape": [2, 4], "chunks": chunks} | changes


def test_what_is_written_is_read() -> None:
    metadata = parse(json.dumps({"weight/w": entry(), "master/w": entry(), "weight/count": entry(dtype="I64")}))
    assert list(metadata.state_dict_metadata) == ["weight/w", "master/w", "weight/count"]
    assert {chunk.file for chunk in metadata.storage_data.values()} == {"a"}


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([], "holds a list"),
        ({"weight/w": []}, "weight/w"),
        ({"weight/w": entry(chunks=entry()["chunks"][:1])}, "weight/w: its 1 chunks do not cover"),
        ({"weight/w": entry(chunks=[])}, "do not cover each element"),
        ({"weight/w": entry(shape=[2, 5])}, "do not cover each element"),
        ({"weight/w": entry(shape=[2, -4])}, "expected a list of sizes"),
        ({"weight/w": entry(shape=[2, True])}, "expected a list of sizes"),
        ({"weight/w": entry(shape=8)}, "expected a list of sizes"),
        ({"weight/w": entry(dtype="F33")}, "F33"),
        ({"weight/w": entry(dtype=["F32"])}, "weight/w"),
        ({"weight/w": entry(dtype="I32"), "exp_avg/w": entry()}, "weight/w is trained and of torch.int32"),
        ({"weight/w": entry(), "master/w": entry(dtype="I64")}, "master/w is trained and of torch.int64"),
        ({"weight/w": entry(chunks=[entry()["chunks"][0], entry()["chunks"][1] | {"file": "../a"}])}, "beside it"),
    ],
)
def test_what_no_writer_writes_is_refused(index: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(json.dumps(index))


def test_a_deeply_nested_index_is_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        parse("[" * 100_000)
