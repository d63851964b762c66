"""A column of a data set, and whose fault it is when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sdp_deepspeed.data.rows import column_of


def test_a_network_failure_is_not_called_a_mistake() -> None:
    def unreachable() -> Any:
        raise ConnectionError("hub is away")

    with pytest.raises(ConnectionError, match="hub is away"):
        list(column_of(unreachable, "text", where="owner/name"))


def test_a_machines_trouble_is_its_own_with_the_name() -> None:
    def fails() -> Any:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match=r"Input/output error: 'a\.jsonl'"):
        list(column_of(fails, "text", where="a.jsonl"))


class Rows:
    """What is read of a data set of `datasets`."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str] | None) -> None:
        self.rows, self.column_names = rows, names

    def select_columns(self, names: list[str]) -> list[dict[str, Any]]:
        return [{name: row[name] for name in names if name in row} for row in self.rows]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.mark.parametrize("names", [["text", "id"], None], ids=["known columns", "columns of the first row"])
def test_blank_and_missing_texts_are_passed_over(names: list[str] | None) -> None:
    rows: list[dict[str, Any]] = [{"text": "one", "id": 1}, {"text": None}, {"id": 2}, {"text": " \n"}, {"text": "two"}]
    assert list(column_of(lambda: Rows(rows, names), "text", where="x")) == ["one", "two"]
    assert list(column_of(lambda: Rows([], names), "text", where="x")) == []


def test_other_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"^owner/name: no column 'body', it has \['text'\]: set text_column"):
        list(column_of(lambda: Rows([], ["text"]), "body", where="owner/name"))
    with pytest.raises(ValueError, match=r"^owner/name: column 'text' holds int, expected text"):
        list(column_of(lambda: Rows([{"text": 5}], ["text"]), "text", where="owner/name"))


def test_the_reason_below_a_wrapped_error_is_told() -> None:
    def broken() -> Any:
        try:
            raise ValueError("line 3:\n no JSON")
        except ValueError as error:
            raise RuntimeError("generation failed") from error

    with pytest.raises(ValueError, match=r"^x: cannot be read as text documents: line 3: no JSON$"):
        list(column_of(broken, "text", where="x"))
