"""Documents from every kind of source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.corpus import StandardLibrary, open_corpus
from sdp_deepspeed.data.parts import documents_of


def _documents(**settings: Any) -> list[str]:
    return list(documents_of(open_corpus(DataConfig(**settings)).parts()))


def test_standard_library_is_sorted_without_tests_and_repeatable(tmp_path: Path) -> None:
    files = {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = 1\n",
        "a/b.txt": b"no python",
        "test/t.py": b"t = 1\n",
        "a/tests/t.py": b"t = 1\n",
        "site-packages/s.py": b"s = 1\n",
        "latin.py": b"# \xe9\xff",
        "huge.py": b"x = 1\n" * 100_000,
        "blank.py": b"\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = StandardLibrary(tmp_path)
    assert list(documents_of(corpus.parts())) == ["z = 1\n", "b = 1\n"]
    before = corpus.fingerprint()
    assert StandardLibrary(tmp_path).fingerprint() == before
    (tmp_path / "b.py").write_bytes(b"b = 2\n")
    assert corpus.fingerprint() != before


def test_standard_library_of_this_interpreter_is_several_parts() -> None:
    documents = _documents()
    assert sum(len(text.encode()) for text in documents) > 3_000_000
    assert len(open_corpus(DataConfig()).parts()) > 1


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_reads_the_same_schema(fineweb: Path, streaming: bool) -> None:
    # A folder of parquet stands for a data set's repository: `datasets` loads both by the same call.
    (fineweb / "001_00000.parquet").unlink()
    texts = _documents(source="hub", path=str(fineweb), streaming=streaming)
    assert texts == ["first\r\npage", "second é", "third", "fourth"]


def test_hub_settings_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return datasets.Dataset.from_dict({"body": ["a", "b"], "other": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = {"source": "hub", "path": "owner/name", "subset": "sample-10BT", "split": "test", "revision": "v1"}
    assert _documents(**config, text_column="body", streaming=False) == ["a", "b"]
    expected = (("owner/name", "sample-10BT"), {"split": "test", "revision": "v1", "streaming": False})
    assert calls
    assert all(call == expected for call in calls)
