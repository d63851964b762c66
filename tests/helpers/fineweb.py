"""Parquet shards with FineWeb's columns, and what the plain tokenizer makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from sdp_deepspeed.data.tokenize_part import is_held_out


def write_shard(path: Path, texts: Sequence[str | None], *, rows: int = 1000) -> Path:
    """One file of a mirror, with so many rows in a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{path.stem}/{number}" for number in range(len(texts))]
    columns = {
        "text": pa.array(texts, pa.string()),
        "id": pa.array(names, pa.string()),
        "dump": pa.array(["CC-MAIN-2024-10"] * len(texts), pa.string()),
        "url": pa.array(names, pa.string()),
        "date": pa.array(["2024-02-20T00:00:00Z"] * len(texts), pa.string()),
        "file_path": pa.array(names, pa.string()),
        "language": pa.array(["en"] * len(texts), pa.string()),
        "language_score": pa.array([0.9] * len(texts), pa.float64()),
        "token_count": pa.array([len(text or "") // 4 for text in texts], pa.int64()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def plain_ids(tokenizer: Any, texts: Iterable[str]) -> list[int]:
    """Ids of documents with an end after each, one call of a Transformers tokenizer for each."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids


def split(texts: Iterable[str], fraction: float) -> dict[str, list[str]]:
    """Documents to train on and held out."""
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for text in texts:
        found["validation" if is_held_out(text, fraction) else "train"].append(text)
    return found
