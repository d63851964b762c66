"""One part of a corpus to token ids: what a process that tokenizes does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.tokenizer import encode

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
# Enough text at once that calling the tokenizer costs nothing, little enough to hold in memory.
_BATCH_CHARACTERS = 1_000_000


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split.

    By its content, not its place: copies of a document fall into the same split, and neither order,
    number of ranks nor seed moves it.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


@dataclass(frozen=True, slots=True)
class SplitCount:
    """What one split holds; bytes of UTF-8, tokens with the ends of documents."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: SplitCount) -> SplitCount:
        return SplitCount(self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens)


@dataclass(frozen=True)
class Task:
    """A part to tokenize.

    Args:
        place: of the part in the stream.
        part: its documents.
        staging: folder for the token ids.
        max_bytes: none of its documents after so many bytes of UTF-8 can be wanted; None means all.
    """

    place: int
    part: Part
    staging: Path
    max_bytes: int | None = None


@dataclass
class TokenizedPart:
    """What became of it: `<place>.train` and `<place>.validation` in the staging folder hold its token ids.

    Args:
        is_cut: the next document would have exceeded `max_bytes`.
    """

    place: int
    counts: dict[SplitName, SplitCount] = field(default_factory=lambda: {split: SplitCount() for split in SPLITS})
    is_cut: bool = False


def path_of(staging: Path, place: int, split: SplitName) -> Path:
    """Where the ids of a part are."""
    return staging / f"{place:08d}.{split}"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest stored integer that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class PartTokenizer:
    """Everything that is the same for all parts.

    Args:
        tokenizer: that `encode` takes.
        end_of_document: its id.
        vocab_size: of the tokenizer.
        validation_fraction: of documents that are held out.
    """

    tokenizer: Any
    end_of_document: int
    vocab_size: int
    validation_fraction: float

    def run(self, task: Task) -> TokenizedPart:
        """Write the ids of all documents of a part, each with the end-of-document token after it."""
        result, dtype = TokenizedPart(task.place), token_dtype(self.vocab_size)
        files = {split: path_of(task.staging, task.place, split).open("wb") for split in SPLITS}
        try:
            for batch in _batches(_limited(task, result)):
                for text, ids in zip(batch, encode(self.tokenizer, batch), strict=True):
                    split: SplitName = "validation" if is_held_out(text, self.validation_fraction) else "train"
                    ids.append(self.end_of_document)
                    files[split].write(np.array(ids, dtype=dtype).tobytes())
                    result.counts[split] += SplitCount(1, len(text.encode("utf-8")), len(ids))
        finally:
            for file in files.values():
                file.close()
        return result


def _limited(task: Task, result: TokenizedPart) -> Iterator[str]:
    """Documents of the task; says in the result when they were cut."""
    total = 0
    for text in task.part.documents():
        total += len(text.encode("utf-8"))
        if task.max_bytes is not None and total > task.max_bytes:
            result.is_cut = True
            return
        yield text


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
