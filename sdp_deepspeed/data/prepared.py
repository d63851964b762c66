"""A prepared folder: two flat streams of token ids on disk (training and held-out), and blocks out of them.

The streams do not depend on the sequence length, so that changing it costs nothing. The folder has `tokenizer/`,
`train.bin`, `validation.bin` (little-endian token ids, end-of-document after each document), `parts.jsonl`
(data/journal.py) and `meta.json`, written last, with the sizes of the streams and the hashes of the tokenizer's files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.tokenize_part import SPLITS, SplitCount, SplitName, token_dtype


class PreparedDataError(RuntimeError):
    """A prepared folder is damaged, or not there; the message names it and says what to do."""


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder: where its tokens are and how many.

    Args:
        folder: where it lies.
        identity: hash of corpus, split and tokenizer.
        vocab_size: ids of the tokenizer; a model needs at least as many.
        counts: by split.
    """

    folder: Path
    identity: str
    vocab_size: int
    counts: Mapping[SplitName, SplitCount]

    def save(self) -> None:
        """Write meta.json, which makes the folder complete."""
        content = {
            "identity": self.identity,
            "vocab_size": self.vocab_size,
            "counts": {split: asdict(count) for split, count in self.counts.items()},
            "tokenizer": self._tokenizer_hashes(),
        }
        (self.folder / "meta.json").write_text(json.dumps(content, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, wait_seconds: float = 10.0) -> PreparedData:
        """Open a prepared folder and check the sizes of its streams and the hashes of its tokenizer's files.

        Args:
            wait_seconds: network file systems may show a new folder to other nodes a little later.

        Raises:
            PreparedDataError: it is not there (not a shared file system?) or damaged.
        """
        give_up = time.monotonic() + wait_seconds
        while not (folder / "meta.json").is_file():
            if time.monotonic() > give_up:
                raise PreparedDataError(
                    f"the prepared data {folder} is not visible here: cache_dir must be on a file system that all "
                    "ranks see, or be prepared on each node with `sdp data <data.json>`"
                )
            time.sleep(0.1)
        try:
            content = json.loads(regular(folder / "meta.json").read_text(encoding="utf-8"))
            counts: Mapping[SplitName, SplitCount] = {split: SplitCount(**content["counts"][split]) for split in SPLITS}
            prepared = cls(folder, content["identity"], content["vocab_size"], counts)
            prepared._check_sizes()
            prepared._check_tokenizer(content.get("tokenizer"))
        except OSError as problem:
            raise PreparedDataError(f"the prepared data {folder} cannot be read: {problem}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise PreparedDataError(f"{folder / 'meta.json'} cannot be read ({problem!r}): delete {folder}") from None
        return prepared

    def _check_sizes(self) -> None:
        itemsize = token_dtype(self.vocab_size).itemsize
        for split in SPLITS:
            path, expected = self.folder / f"{split}.bin", self.counts[split].tokens * itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                raise PreparedDataError(f"{path} is damaged ({size} bytes, expected {expected}): delete {self.folder}")

    def _tokenizer_hashes(self) -> dict[str, str]:
        """SHA-256 of each of its files by name."""
        files = sorted(path for path in (self.folder / "tokenizer").glob("*") if path.is_file())
        return {path.name: hashlib.sha256(regular(path).read_bytes()).hexdigest() for path in files}

    def _check_tokenizer(self, hashes: dict[str, str] | None) -> None:
        """None: it was written before there were hashes."""
        if hashes is None:
            return
        found = self._tokenizer_hashes()
        for name in sorted(found.keys() | hashes.keys()):
            if found.get(name) != hashes.get(name):
                path = self.folder / "tokenizer" / name
                raise PreparedDataError(f"{path} is missing, or not as it was written: delete {self.folder}")

    def blocks(self, split: SplitName, sequence_length: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """[N, T] token ids as a read-only memory map; the last incomplete block is left out (fewer than T tokens)."""
        num_blocks = self.counts[split].tokens // sequence_length
        dtype = token_dtype(self.vocab_size)
        if num_blocks == 0:  # an empty file cannot be mapped
            return np.empty((0, sequence_length), dtype=dtype)
        path = self.folder / f"{split}.bin"
        return np.memmap(regular(path), dtype=dtype, mode="r", shape=(num_blocks, sequence_length))

    def tokenizer(self) -> Any:
        """The tokenizer that made the tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")

    def __str__(self) -> str:
        train, held = self.counts["train"], self.counts["validation"]
        return (
            f"{train.documents:,} documents, {train.bytes / 1e6:.1f} MB, {train.tokens:,} tokens to train on; "
            f"{held.documents:,} documents, {held.tokens:,} tokens held out; vocabulary {self.vocab_size:,}"
        )
