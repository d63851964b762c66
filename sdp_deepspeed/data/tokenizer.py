"""Tokenizers: a byte-level BPE trained on the corpus, or any of Transformers; and fast encoding with either."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_OF_DOCUMENT = "<|endoftext|>"
# More text hardly changes the merges, but the memory to find them grows with it.
TRAINING_BYTES = 64 * 2**20
# Characters of a word. The time to find merges grows with the square of it, and what is longer is no word: a picture in
# base64, a genome, a line of spaces.
LONGEST_RUN = 1000
LOG_SECONDS = 60.0

log = logging.getLogger(__name__)

# What the pre-tokenizer keeps in one piece: letters, digits, blanks, or all else.
_KINDS = (r"[^\W\d_]", r"\d", r"\s", r"[^\w\s]|_")
_LONG_RUN = re.compile("|".join(f"(?:{kind}){{{LONGEST_RUN + 1},}}" for kind in _KINDS))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer from the first 64 MiB of `documents`.

    Args:
        vocab_size: an upper bound; small corpora have fewer pairs worth merging.

    Returns:
        a Transformers tokenizer that can write down any text; end-of-document is its eos and pad token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _telling_progress(f"training a tokenizer of up to {vocab_size:,} entries"):
        tokenizer.train_from_iterator(_first_bytes(documents, TRAINING_BYTES), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, pad_token=END_OF_DOCUMENT)


def _first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    for text in documents:
        yield from _without_long_runs(text)
        limit -= len(text.encode("utf-8"))
        if limit <= 0:
            return


def _without_long_runs(text: str) -> Iterator[str]:
    """The text in parts, so that no word of it is longer than LONGEST_RUN."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


@contextmanager
def _telling_progress(what: str) -> Iterator[None]:
    """A line at the start, and one every minute: the library has none of its own but a bar."""
    log.info(what)
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(LOG_SECONDS):
            log.info("%s: %.0f s so far", what, time.monotonic() - began)

    thread = threading.Thread(target=tell, name="tokenizer-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def load_tokenizer(name: str) -> Any:
    """A Transformers tokenizer by hub name or folder.

    Raises:
        ValueError: it cannot be found or read, or has no token for the end of a document.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"tokenizer {name!r}: expected a folder or a name on the hub; {said}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no eos_token, which separates documents: set eos_token in its "
            "tokenizer_config.json, or leave out tokenizer to train one"
        )
    return tokenizer


def vocabulary_size(tokenizer: Any) -> int:
    """Number of ids that a model must have; some tokenizers leave gaps, so that `len` is too small for them."""
    return max(len(tokenizer), *(int(i) + 1 for i in tokenizer.get_vocab().values()))


def identity(tokenizer: Any) -> str:
    """A hash of all that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        backend.to_str() if backend else json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    )
    return hashlib.sha256(f"{tokenizer.eos_token_id}:{rules}".encode()).hexdigest()


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, whole and without special tokens around it.

    Args:
        tokenizer: of Transformers, or the one of `tokenizers` that is in it.
    """
    backend = tokenizer if hasattr(tokenizer, "encode_batch_fast") else getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    # A tokenizer.json may carry its last user's limits, which would cut documents without a word.
    backend.no_truncation()
    backend.no_padding()
    # Half the time of calling the tokenizer: it also returns offsets and masks.
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer in a folder, as a process that only tokenizes needs it.

    Args:
        folder: of `save_pretrained`.
        end_of_document: the id that separates documents.
        vocab_size: ids.
        is_fast: whether the library `tokenizers` alone can do it, which starts in a tenth of the time.
    """

    folder: Path
    end_of_document: int
    vocab_size: int
    is_fast: bool

    @classmethod
    def of(cls, tokenizer: Any, folder: Path) -> SavedTokenizer:
        """Of one that was saved in `folder`."""
        is_fast = getattr(tokenizer, "backend_tokenizer", None) is not None and (folder / "tokenizer.json").is_file()
        return cls(folder, int(tokenizer.eos_token_id), vocabulary_size(tokenizer), is_fast)

    def load(self) -> Any:
        """What `encode` takes."""
        if self.is_fast:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)
