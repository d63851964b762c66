"""Small corpora."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from sdp_deepspeed.data import DataConfig
from tests.helpers.documents import NUM_DOCUMENTS, text


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A corpus of numbered documents, to be prepared with whatever settings a test wants."""
    with (tmp_path / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text(number)}) + "\n" for number in range(NUM_DOCUMENTS))
    defaults: dict[str, Any] = {
        "source": "files",
        "path": str(tmp_path / "data.jsonl"),
        "vocab_size": 400,
        "sequence_length": 16,
        "validation_fraction": 0.1,
        "cache_dir": str(tmp_path / "cache"),
    }
    return lambda **changes: DataConfig.from_dict(defaults | changes)


@pytest.fixture
def fineweb(tmp_path: Path) -> Path:
    """Two shards of parquet with FineWeb's columns, and one without rows."""
    folder = tmp_path / "fineweb"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "left_over.parquet").write_bytes(b"not data")
    for shard, texts in enumerate((["first\r\npage", "second é", "  "], [], ["third", "fourth"])):
        columns = {"text": texts, "id": texts, "dump": texts, "url": texts, "language": texts}
        table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
        scores = pa.array([0.5] * len(texts), pa.float64())
        pq.write_table(table.append_column("language_score", scores), folder / f"00{shard}_00000.parquet")
    return folder
