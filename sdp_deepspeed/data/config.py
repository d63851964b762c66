"""What to train on: the settings of the data, checked where they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import pydantic

from sdp_deepspeed.data.source_mix import SOURCE_KEYS, shares, wrong_entries
from sdp_deepspeed.messages import did_you_mean

DEFAULT_VOCAB_SIZE = 2048
DEFAULT_TEXT_COLUMN = "text"
# 256 bytes and the end-of-document token: with fewer, some text could not be written down.
SMALLEST_VOCAB_SIZE = 257
# More than any known vocabulary has, and than the text that is learned from is good for.
LARGEST_VOCAB_SIZE = 2**20
# More than any machine has cores.
MOST_WORKERS = 1024

# Settings that only one kind of source reads. Given for another one they would have no effect, which is an error.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "path": ("files", "hub"),
    "text_column": ("files", "hub"),
    "text_documents": ("files",),
    "subset": ("hub",),
    "split": ("hub",),
    "revision": ("hub",),
    "streaming": ("hub",),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes blocks of tokens.

    Args:
        source: "stdlib" (source code of the running interpreter's standard library), "files"
            (local .txt, .jsonl or .parquet) or "hub" (a data set by name, such as HuggingFaceFW/fineweb).
        path: files: a file, a folder (searched recursively) or a glob; hub: the data set's name.
        text_column: column or JSON key that holds a document's text; None means "text".
        text_documents: .txt files only: what is one document, "file" (None means this), "paragraph"
            (blank lines separate) or "line".
        subset: hub: the data set's configuration, such as "sample-10BT".
        split: hub: the data set's split to read; None means "train".
        revision: hub: commit or tag. The cache cannot see a data set change behind an unpinned name.
        streaming: hub: read without downloading first; None means true.
        max_bytes: stop before the document that would take the total past this size, in bytes of UTF-8; None means all.
        sources: several texts that are mixed; each has the keys above and a "weight" (its share of the training blocks,
            relative to the others'; 1 by default), which are then not given outside.
        tokenizer: any Transformers tokenizer by name or folder; None trains a byte-level BPE on the training documents.
        vocab_size: entries of the trained tokenizer, an upper bound (small corpora give fewer); None means 2048.
        sequence_length: tokens per block, T.
        validation_fraction: share of documents held out, by a hash of their text; 0 holds out none.
        validation_blocks: evaluate on at most this many blocks, a fixed sample of the held-out ones; None means all.
        tokenize: "before" (None means this: all text before the first step) or "during" (training begins with the first
            tokens, and processes beside it stay ahead).
        shuffle_window: tokenize "during" only: blocks of the first epoch are shuffled among so many; None means 8192.
        workers: processes that tokenize; None means one per core, with "during" a quarter of it. No effect on tokens.
        seed: order of the training blocks, and of mixed sources. It changes neither the split nor the tokenizer.
        cache_dir: folder for tokenizer and tokens, on a file system that all ranks see.

    Raises:
        ValueError: a value that cannot be used or that this source would not read.
    """

    source: Literal["stdlib", "files", "hub"] = "stdlib"
    path: str | None = None
    text_column: str | None = None
    text_documents: Literal["file", "paragraph", "line"] | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool | None = None
    max_bytes: int | None = None
    sources: list[dict[str, Any]] | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    sequence_length: int = 128
    validation_fraction: float = 0.02
    validation_blocks: int | None = None
    tokenize: Literal["before", "during"] | None = None
    shuffle_window: int | None = None
    workers: int | None = None
    seed: int = 0
    cache_dir: str = "~/.cache/sdp_deepspeed"

    def __post_init__(self) -> None:
        # Ranges mean nothing for a value of the wrong type, so types come first and alone.
        problems = _wrong_types(self) or [*_misplaced(self), *_out_of_range(self)]
        if problems:
            raise ValueError("data: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataConfig:
        """A config from JSON; unknown keys are a ValueError that names them and the nearest known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [f"unknown key {key!r} ({did_you_mean(key, known)})" for key in values if key not in known]
        if unknown:
            raise ValueError("data: " + "; ".join(unknown))
        return cls(**values)

    @property
    def during(self) -> bool:
        """Whether training begins before all is tokenized."""
        return self.tokenize == "during"

    def each_source(self) -> list[DataConfig]:
        """One config for each text that is mixed; this one, where it is one."""
        if self.sources is None:
            return [self]
        entries = [{key: value for key, value in entry.items() if key != "weight"} for entry in self.sources]
        return [dataclasses.replace(self, sources=None, **entry) for entry in entries]


def _wrong_types(config: DataConfig) -> list[str]:
    problems = []
    for name, hint in get_type_hints(DataConfig).items():
        value = getattr(config, name)
        try:
            pydantic.TypeAdapter(hint).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            expected = " or ".join(dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors()))
            problems.append(f"{name} is {value!r}, expected {expected}")
    return problems


def _misplaced(config: DataConfig) -> list[str]:
    if config.sources is not None:
        return [*_outside_sources(config), *_wrong_sources(config), *_without_effect(config)]
    return [*_misplaced_in_source(config), *_without_effect(config)]


def _outside_sources(config: DataConfig) -> list[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(DataConfig)}
    given = [key for key in SOURCE_KEYS if getattr(config, key) != defaults[key]]
    return [f"{key} has no effect beside sources: move it into one of them" for key in given]


def _wrong_sources(config: DataConfig) -> list[str]:
    """What is wrong with each source, as if it were the only one."""
    assert config.sources is not None
    problems = wrong_entries(config.sources)
    for number, entry in enumerate([] if problems else config.sources):
        settings = {key: value for key, value in entry.items() if key != "weight"}
        try:
            DataConfig(**settings)
        except ValueError as error:
            problems.append(f"sources[{number}]: " + str(error).removeprefix("data: "))
    return problems or shares(config.sources)[1]


def _misplaced_in_source(config: DataConfig) -> list[str]:
    problems = []
    for name, sources in _ONLY_FOR.items():
        if getattr(config, name) is not None and config.source not in sources:
            problems.append(
                f"{name} has no effect with source {config.source!r}: drop it, or use {' or '.join(sources)}"
            )
    if config.source != "stdlib" and not config.path:
        what = "a file, folder or glob" if config.source == "files" else "the data set's name"
        problems.append(f"source {config.source!r} needs path: {what}")
    return problems


def _without_effect(config: DataConfig) -> list[str]:
    problems = []
    if config.tokenizer is not None and config.vocab_size is not None:
        problems.append(f"vocab_size has no effect with tokenizer {config.tokenizer!r}: give one of the two")
    if config.validation_blocks is not None and config.validation_fraction == 0:
        problems.append("validation_blocks has no effect with validation_fraction 0: drop it")
    if config.shuffle_window is not None and not config.during:
        problems.append('shuffle_window has no effect unless tokenize is "during": all blocks are shuffled')
    if config.during and config.validation_fraction and config.validation_blocks is None:
        problems.append(
            'tokenize "during" needs validation_blocks (or validation_fraction 0): all of the held-out text is not '
            "known before the end"
        )
    if config.sources is not None and config.validation_fraction and config.validation_blocks is None:
        problems.append(
            "sources need validation_blocks (or validation_fraction 0), which they share as they do training"
        )
    return problems


def _out_of_range(config: DataConfig) -> list[str]:
    smallest = {"max_bytes": 1, "vocab_size": SMALLEST_VOCAB_SIZE, "sequence_length": 2, "validation_blocks": 1}
    smallest |= {"shuffle_window": 1, "workers": 1}
    problems = [
        f"{name} is {value}, expected at least {least}"
        for name, least in smallest.items()
        if (value := getattr(config, name)) is not None and value < least
    ]
    if config.vocab_size is not None and config.vocab_size > LARGEST_VOCAB_SIZE:
        problems.append(f"vocab_size is {config.vocab_size}, expected at most {LARGEST_VOCAB_SIZE}")
    if config.workers is not None and config.workers > MOST_WORKERS:
        problems.append(f"workers is {config.workers}, expected at most {MOST_WORKERS}")
    if not 0 <= config.validation_fraction < 1:
        problems.append(f"validation_fraction is {config.validation_fraction}, expected 0 <= fraction < 1")
    if not 0 <= config.seed < 2**63:
        problems.append(f"seed is {config.seed}, expected 0 <= seed < 2**63")
    return problems
