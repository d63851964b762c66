"""A data set by name: its files are found by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdp_deepspeed.data.network import reaching
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.row_groups import row_groups_of
from sdp_deepspeed.data.rows import column_of
from sdp_deepspeed.messages import quoted

_PART_ROWS = 2000


@dataclass(frozen=True)
class HubDataset:
    """A data set by name; its rows are the documents. `datasets` finds its files, and keeps its own download cache."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    text_column: str
    streaming: bool

    def parts(self) -> Sequence[Part]:
        """Row groups where its files are parquet, as they are at FineWeb; else one part, or ranges of what is
        downloaded."""
        with reaching(self._described()):
            if not self.streaming:
                rows = len(self.load())
                return [HubRows(self, start, min(start + _PART_ROWS, rows)) for start in range(0, rows, _PART_ROWS)]
            import datasets
            from datasets.packaged_modules.parquet.parquet import Parquet

            builder = datasets.load_dataset_builder(self.name, self.subset, revision=self.revision)
            files = builder.config.data_files
            if not isinstance(builder, Parquet) or not files:
                return [HubRows(self, 0, None)]
            if self.split not in files:
                raise ValueError(f"{self.name}: no split {self.split!r}, it has {quoted(map(str, files))}: set split")
        return row_groups_of([str(file) for file in files[self.split]], self.text_column)

    def load(self) -> Any:
        """What `datasets` has of it."""
        import datasets

        return datasets.load_dataset(
            self.name, self.subset, split=self.split, revision=self.revision, streaming=self.streaming
        )

    def _described(self) -> str:
        return self.name + (f" ({self.subset})" if self.subset else "")

    def fingerprint(self) -> str:
        # By name only: asking the hub would make a start without network impossible although all is cached.
        return f"hub:{self.name}:{self.subset}:{self.split}:{self.revision}:{self.text_column}"


@dataclass(frozen=True)
class HubRows:
    """Rows of a data set from `first` up to `stop`, None for all."""

    dataset: HubDataset
    first: int
    stop: int | None

    @property
    def size(self) -> int:
        """Of what is not known a row counts as a kilobyte."""
        return 1000 * ((self.stop or self.first + _PART_ROWS) - self.first)

    def documents(self) -> Iterator[str]:
        with reaching(self.dataset.name):
            yield from column_of(self._load, self.dataset.text_column, where=self.dataset.name)

    def _load(self) -> Any:
        rows = self.dataset.load()
        return rows if self.stop is None else rows.select(range(self.first, self.stop))
