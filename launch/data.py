"""Text data for a causal language model: load, split, tokenize and pack into blocks, with `datasets`.

To add a data source, add an entry to `sources` of the recipe, with the arguments of `datasets.load_dataset`. For data
that it cannot load, write a generator like `standard_library` below.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import xxhash
from datasets import Dataset, IterableDataset, interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

Texts: TypeAlias = "Dataset | IterableDataset"


@dataclass
class Data:
    """The section `data` of a recipe.

    Args:
        sources: arguments of `load_dataset` for each source (`path`: the name of a dataset, a folder, or json, parquet
            or text with `data_files`), or `path: standard_library`. Also `text_column` (default "text") and `weight`,
            the share of the blocks.
        sequence_length: tokens per block.
        tokenizer: name or folder. By default a byte-level BPE is trained on the first `tokenizer_documents` documents.
        vocab_size: vocabulary size of the trained tokenizer.
        validation_fraction: share of the documents to hold out, chosen by a hash of the text.
        validation_blocks: maximum number of held-out blocks in an evaluation.
        streaming: read and tokenize during training, instead of once before it. Requires `max_steps`.
        num_proc: number of processes that tokenize (without streaming).
    """

    sources: list[dict[str, Any]]
    sequence_length: int
    tokenizer: str | None = None
    vocab_size: int = 32_000
    tokenizer_documents: int = 20_000
    validation_fraction: float = 0.005
    validation_blocks: int = 512
    streaming: bool = False
    num_proc: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: empty; name at least one, such as {path: standard_library}")
        for source in self.sources:
            if "path" not in source or not float(source.get("weight", 1)) > 0:
                raise ValueError(f"sources: got {source}; each needs a path, and a weight above 0 if it has one")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction: got {self.validation_fraction}, expected a number between 0 and 1")


@dataclass
class Blocks:
    """Tokenizer, training and validation data of a run. Rows have one column, `input_ids`, of a fixed length."""

    tokenizer: PreTrainedTokenizerBase
    train: Texts
    validation: list[dict[str, list[int]]] = field(repr=False)


def load_blocks(data: Data, seed: int, folder: Path) -> Blocks:
    """Load the tokenizer and the blocks. Without streaming, `datasets` caches the tokenized blocks.

    Args:
        folder: output folder of the run. A trained tokenizer is stored there for resumed runs.

    Raises:
        ValueError: the text column does not exist, or no block is held out.
    """
    sources = [_load_source(source, data.streaming, seed) for source in data.sources]
    splits = [_split(texts, data.validation_fraction) for texts in sources]
    tokenizer = _tokenizer(data, [train for train, _ in splits], folder)
    train = [_pack(texts, tokenizer, data) for texts, _ in splits]
    validation = [_pack(texts, tokenizer, data, batch_size=20) for _, texts in splits]
    weights = [float(source.get("weight", 1)) for source in data.sources]
    blocks = Blocks(tokenizer, _mix(train, weights, seed), _held_out(data, validation, folder))
    if not blocks.validation:
        raise ValueError("no block is held out; use more text or a larger validation_fraction")
    return blocks


def _held_out(data: Data, sources: list[Texts], folder: Path) -> list[dict[str, list[int]]]:
    """Held-out blocks of all sources. Those of streams are saved in the output folder, since collecting them means
    reading a lot of text."""
    saved = folder / "held_out.json"
    if data.streaming and saved.exists():
        rows: list[dict[str, list[int]]] = json.loads(saved.read_text())
        return rows
    share = -(-data.validation_blocks // len(sources))
    rows = [row for texts in sources for row in islice(texts, share)]
    if data.streaming:
        unfinished = saved.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(rows))
        unfinished.rename(saved)
    return rows


def _load_source(source: dict[str, Any], streaming: bool, seed: int) -> Texts:
    """Load documents, with the single column `text`."""
    options = {"split": "train"} | source
    options.pop("weight", None)
    column = options.pop("text_column", "text")
    if options["path"] == "standard_library":
        texts: Texts = Dataset.from_generator(standard_library)
        texts = texts.to_iterable_dataset(num_shards=64) if streaming else texts
    else:
        texts = load_dataset(streaming=streaming, **options)
    if column not in (texts.column_names or [column]):  # some streams do not know theirs yet
        raise ValueError(f"no column {column!r} in {options['path']}, which has {texts.column_names}; set text_column")
    texts = texts.select_columns([column])
    texts = texts if column == "text" else texts.rename_column(column, "text")
    if isinstance(texts, IterableDataset):  # random order of shards, ten of them interleaved, without a shuffle buffer
        texts = texts.reshard().shuffle(seed, buffer_size=1, max_buffer_input_shards=10)
    return texts


def standard_library() -> Iterator[dict[str, str]]:
    """Yield the source files of Python's standard library, without tests, encodings and installed packages."""
    skipped = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts) and path.stat().st_size < 400_000:
            yield {"text": path.read_text(encoding="utf-8", errors="ignore")}


def _split(texts: Texts, fraction: float) -> tuple[Texts, Texts]:
    """Split documents into training and held-out ones by hash, so that duplicates end up on the same side."""

    def is_held_out(text: str, fraction: float, wanted: bool) -> bool:
        return (xxhash.xxh64_intdigest(text.encode()) < fraction * 2**64) == wanted

    train, held_out = (
        texts.filter(partial(is_held_out, fraction=fraction, wanted=wanted), input_columns="text")
        for wanted in (False, True)
    )
    return train, held_out


def _tokenizer(data: Data, sources: list[Texts], folder: Path) -> PreTrainedTokenizerBase:
    if data.tokenizer is not None:
        return AutoTokenizer.from_pretrained(data.tokenizer)
    saved = folder / "tokenizer"
    if not saved.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        share = data.tokenizer_documents // len(sources) + 1
        texts = (row["text"] for source in sources for row in islice(source, share))
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, data.vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
        new = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
        with TemporaryDirectory(dir=folder) as unfinished:
            new.save_pretrained(f"{unfinished}/tokenizer")
            with suppress(OSError):  # another node has created it
                Path(unfinished, "tokenizer").rename(saved)
    return AutoTokenizer.from_pretrained(saved)


def _pack(texts: Texts, tokenizer: PreTrainedTokenizerBase, data: Data, batch_size: int = 1000) -> Texts:
    """Concatenate documents and cut them into blocks of `sequence_length` tokens; drop the rest of each batch."""

    def pack(batch: dict[str, list[str]], tokenizer: Any, length: int) -> dict[str, list[list[int]]]:
        documents = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        ids = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in documents))
        return {"input_ids": [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]}

    function = partial(pack, tokenizer=tokenizer, length=data.sequence_length)
    options = {"num_proc": data.num_proc} if isinstance(texts, Dataset) else {}
    return texts.map(function, batched=True, batch_size=batch_size, remove_columns=["text"], **options)


def _mix(sources: list[Texts], weights: list[float], seed: int) -> Texts:
    """Interleave the sources by weight; sources that end early are repeated."""
    if len(sources) == 1:
        return sources[0]
    shares = [weight / sum(weights) for weight in weights]
    return interleave_datasets(sources, shares, seed, stopping_strategy="all_exhausted")


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate rows into `input_ids` and `labels`, both [batch, length]."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


class Stream:
    """One rank's share of streamed blocks, repeated forever, whose position can be saved between two batches.

    Blocks are read in the process of the rank: SIGTERM, which makes the run save, would kill dataloader workers.
    """

    def __init__(self, blocks: IterableDataset, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # If there are enough shards (files, row groups), each rank tokenizes its own; else every rank tokenizes all.
        strategy: Any = "shards" if blocks.num_shards >= world_size else "examples"
        self.blocks = split_dataset_by_node(blocks, rank, world_size, strategy).repeat(None)

    def loader(self, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.blocks, batch_size, collate_fn=collate)

    def save(self, folder: str | Path) -> None:
        path = self._path(folder)
        path.with_suffix(".tmp").write_text(json.dumps(self.blocks.state_dict()))
        path.with_suffix(".tmp").rename(path)

    def load(self, folder: str | Path) -> None:
        """Restore the position from a checkpoint.

        Raises:
            ValueError: the checkpoint has no stream, or was saved by a different number of ranks.
        """
        saved = len([*Path(folder).glob("stream_*.json")])
        if not saved:
            raise ValueError(f"{folder}: no stream position was saved; resume with data.streaming=false")
        if saved != self.world_size:
            raise ValueError(
                f"{folder}: a stream of {saved} ranks cannot resume on {self.world_size}; use {saved} ranks"
            )
        self.blocks.load_state_dict(json.loads(self._path(folder).read_text()))

    def _path(self, folder: str | Path) -> Path:
        return Path(folder, f"stream_{self.rank}.json")
