"""Data sets by name: which files are theirs, and what is said where the hub cannot be reached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp_deepspeed.data.hub import HubDataset, HubRows
from sdp_deepspeed.data.network import reaching
from sdp_deepspeed.data.parts import documents_of
from sdp_deepspeed.data.row_groups import RowGroups


def _dataset(path: Path, **changes: Any) -> HubDataset:
    settings = {"subset": None, "split": "train", "revision": None, "text_column": "text", "streaming": True}
    return HubDataset(name=str(path), **(settings | changes))


def test_parquet_is_read_by_row_group(fineweb: Path) -> None:
    parts = _dataset(fineweb).parts()
    assert all(isinstance(part, RowGroups) for part in parts)
    assert list(documents_of(parts)) == ["first\r\npage", "second é", "third", "fourth"]
    with pytest.raises(ValueError, match=rf"^{fineweb}: no split 'test', it has 'train': set split"):
        _dataset(fineweb, split="test").parts()


def test_other_files_are_one_part(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    parts = _dataset(tmp_path).parts()
    assert [type(part) for part in parts] == [HubRows]
    assert list(documents_of(parts)) == ["one", "two"]


def test_what_was_downloaded_is_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp_deepspeed.data.hub._PART_ROWS", 2)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(5)))
    parts = _dataset(tmp_path, streaming=False).parts()
    assert [list(part.documents()) for part in parts] == [["0", "1"], ["2", "3"], ["4"]]


def test_settings_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[Any] = []

    def load_dataset_builder(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return SimpleNamespace(config=SimpleNamespace(data_files=None))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    _dataset(Path("owner/name"), subset="sample-10BT", revision="v1").parts()
    assert calls == [(("owner/name", "sample-10BT"), {"revision": "v1"})]


def test_no_network_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset_builder(*args: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach it\n(timeout)")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(ConnectionError) as error:
        _dataset(Path("owner/name"), subset="sample-10BT").parts()
    said = str(error.value)
    assert "\n" not in said
    for words in (
        "owner/name (sample-10BT)",
        "Couldn't reach it (timeout)",
        '"source": "files"',
        "sdp data",
        "cache_dir",
    ):
        assert words in said


class HfHubHTTPError(Exception):
    """Of a library, by its name."""


@pytest.mark.parametrize(
    ("error", "is_of_network"),
    [
        (TimeoutError("slow"), True),
        (HfHubHTTPError("429"), True),
        (FileNotFoundError("no such folder"), False),
        (ValueError("bad json"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_only_the_networks_errors_are_called_that(error: Exception, is_of_network: bool) -> None:
    with pytest.raises(ConnectionError if is_of_network else type(error)) as caught, reaching("owner/name"):
        raise error
    assert ("Without a network" in str(caught.value)) is is_of_network


def test_a_wrapped_error_of_the_network_is_one() -> None:
    outer = RuntimeError("generation failed")
    outer.__cause__ = ConnectionError("away")
    with pytest.raises(ConnectionError, match="Without a network"), reaching("owner/name"):
        raise outer
